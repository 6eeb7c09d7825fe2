"""Laws that hold over a whole domain, tried on values that hypothesis chooses: the same ones every
time, and few, so that they are quick."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from efftrain_cli.data.corpus import apportion
from efftrain_cli.data.windows import permute
from efftrain_cli.foundation.section import parse_count
from efftrain_cli.foundation.step import StepPlan
from efftrain_cli.methods.seq_len_warmup import SeqLenWarmup
from efftrain_cli.plan.plan import accumulation_steps, plan_run
from efftrain_cli.recipe.schedules import SCHEDULES, ScheduleName
from efftrain_cli.recipe.sections import Train
from efftrain_cli.run.lines import parse, sealed, split_lines
from efftrain_cli.run.metrics import latest_rows, read_metrics
from tests.fake_runs import write_sealed
from tests.tiny import tiny_recipe

quick = settings(max_examples=40, deadline=None, derandomize=True, database=None)

RECIPE = tiny_recipe(
    "model.seq_len=64", "optim={lr = 1e-3, min_lr = 1e-4, warmup_steps = 10}", "eval.every=30"
)


# --- data -----------------------------------------------------------------------------------------


@quick
@given(
    st.integers(1, 5000),
    st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=8).filter(
        lambda key: len(key) % 2 == 0
    ),
)
def test_the_order_of_windows_is_a_permutation(n, key):
    """F8: each window once per epoch; the plan counts them through a stop."""
    found = permute(np.arange(n), n, np.array(key, dtype=np.uint64))
    assert sorted(found.tolist()) == list(range(n))


@quick
@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=12), st.integers(0, 10_000))
def test_shares_add_up_and_are_each_within_one_of_exact(weights, total):
    shares = apportion(weights, total)
    assert sum(shares) == total
    assert all(
        abs(share - weight * total / sum(weights)) < 1 + 1e-6
        for share, weight in zip(shares, weights, strict=True)
    )


# --- schedules ------------------------------------------------------------------------------------

cuts = st.sampled_from(
    (
        {"mode": "truncate"},
        {"mode": "reshape"},
        {"batch": "tokens"},
    )
)
warmups = st.builds(
    lambda start, steps, multiple, pacing, degree, cut: SeqLenWarmup(
        start=start, steps=steps, multiple=multiple, pacing=pacing, degree=degree, **cut
    ),
    st.integers(1, 64),
    st.integers(1, 60),
    st.sampled_from((1, 2, 8, 16)),
    st.sampled_from(("linear", "root")),
    st.integers(1, 4),
    cuts,
)
phases = st.builds(
    lambda lengths, cut: SeqLenWarmup(
        pacing="discrete",
        lengths=(*lengths, 64),
        until=tuple(range(2, 2 * len(lengths) + 1, 2)),
        **cut,
    ),
    st.lists(st.integers(1, 64), min_size=1, max_size=3),
    cuts,
)


@quick
@given(
    st.sampled_from(get_args(ScheduleName)),
    st.integers(0, 30),
    st.one_of(st.none(), warmups, phases),
    st.integers(1, 64 * 8 * 60),
    st.integers(1, 400),
    st.integers(1, 12),
    st.sampled_from((1, 2, 3)),
)
def test_a_plan_counts_every_token_and_window_and_keeps_the_rate_in_its_bounds(
    schedule, warmup_steps, warmup, tokens, micro_batch_tokens, batch_size, ranks
):
    if warmup is not None and warmup.steps is not None:
        assume(warmup.start % warmup.multiple == 0 and warmup.start <= 64 and warmup.multiple <= 64)
    try:
        recipe = replace(
            RECIPE,
            optim=replace(
                RECIPE.optim,
                schedule=schedule,
                warmup_steps=warmup_steps,
                decay_share=0.2 if SCHEDULES[schedule].has_plateau else None,
            ),
            train=Train(
                tokens=tokens, batch_size=batch_size, micro_batch_tokens=micro_batch_tokens
            ),
            seq_len_warmup=warmup,
        )
    except ValueError:  # a rule between the sections, which is another test's matter
        assume(False)
    trained = windows = 0
    last = None
    for number, (plan, after) in enumerate(plan_run(recipe), 1):
        assert (
            plan.step == number == after.step and plan.window_start == windows and trained < tokens
        )
        per_window = 1
        if warmup is not None and warmup.mode == "reshape":
            per_window = 64 // plan.seq_len
        if warmup is not None and warmup.batch == "tokens":
            # The most whole sequences within a full step's tokens.
            assert plan.tokens <= 64 * batch_size < plan.tokens + plan.seq_len
        else:
            assert plan.batch_size == batch_size
        # The fewest windows that hold them, each cut from its beginning.
        assert plan.sequences_per_window == per_window
        assert (plan.windows - 1) * per_window < plan.batch_size <= plan.windows * per_window
        trained += plan.batch_size * plan.seq_len
        windows += plan.windows
        assert (after.tokens, after.windows) == (trained, windows)
        assert after.tokens + after.tokens_discarded == windows * recipe.model.seq_len
        # Whoever gets a micro-batch: each sequence is in exactly one, and no two sizes differ by
        # more than one.
        sizes = [plan.sequences_of(i) for i in range(plan.accumulation_steps)]
        assert sum(sizes) == plan.batch_size and max(sizes) - min(sizes) <= 1 <= min(sizes)
        # As few as hold what fits, and equally many on every rank.
        fits = max(1, micro_batch_tokens // plan.seq_len)
        count = accumulation_steps(recipe, plan.batch_size, plan.seq_len, ranks)
        assert max(sizes) <= fits and count % ranks == 0
        assert (count - ranks) * fits < plan.batch_size <= count * fits
        assert 0 < plan.lr <= recipe.optim.lr * (1 + 1e-12)
        if last is not None and number > warmup_steps + 1:
            assert plan.lr <= last.lr * (1 + 1e-12)
        last = plan
    assert trained >= tokens and isinstance(last, StepPlan) and last.evaluate


# --- rows -----------------------------------------------------------------------------------------

segments = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 8)), min_size=1, max_size=6)
"""How a run was written: (first step of a start or resume, rows that it wrote)."""


def written(runs: list[tuple[int, int]]) -> list[dict[str, float]]:
    """Rows as they come: a resume begins at most one step behind what there is."""
    rows: list[dict[str, float]] = []
    for segment, (first, count) in enumerate(runs):
        first = min(first, int(rows[-1]["step"]) + 1) if rows else 0
        rows += [
            {"step": step, "segment": segment, "loss": segment + step / 100, "tokens": 8.0 * step}
            for step in range(first, first + count)
        ]
    return rows


@quick
@given(segments)
def test_rows_that_count_are_those_a_dictionary_written_in_order_and_cut_at_each_resume_would_hold(
    runs,
):
    rows = written(runs)
    kept: dict[int, dict[str, float]] = {}
    for row in rows:
        kept = {step: old for step, old in kept.items() if step < row["step"]} | {
            int(row["step"]): row
        }
    with TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        write_sealed(path, rows)
        assert latest_rows(path.parent) == list(kept.values())
        fast = read_metrics(path.parent, ("step", "segment", "loss", "tokens"))
    assert fast.frame.to_dict("records") == list(kept.values())
    assert fast.corrupt == ()


values = st.dictionaries(
    st.text("abcxyz_", min_size=1, max_size=8),
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**60), 2**60),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text('aZ0 "\\\n\x00\u2028é猫😀', max_size=12),
    ),
    min_size=1,
    max_size=6,
)


@quick
@given(values, st.data())
def test_a_line_comes_back_as_it_was_and_no_flipped_bit_of_it_passes(row, data):
    line = sealed(row).encode()
    assert parse(line) == row and split_lines(line + b"\n").texts == [line]
    place, bit = data.draw(st.integers(0, len(line) - 1)), data.draw(st.integers(0, 7))
    flipped = bytearray(line)
    flipped[place] ^= 1 << bit
    found = split_lines(bytes(flipped) + b"\n")
    assert found.texts == []


# --- recipes --------------------------------------------------------------------------------------


@quick
@given(st.integers(0, 10**15))
def test_a_count_is_exact_however_it_is_written(number):
    assert parse_count(f"{number:_}") == number == parse_count(str(number))
    assert parse_count(f"{number / 1000:.3f}K" if number < 10**11 else f"{number}") == number
