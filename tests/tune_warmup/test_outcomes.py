"""What a search says in the end: seeds that vote, grids, and settings that cannot be searched or
are never stable."""

from __future__ import annotations

import itertools
import math
import re

import pytest
from scipy import stats

from efftrain_cli.foundation.console import make_console
from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.methods.seq_len_warmup import SeqLenWarmup
from efftrain_cli.plan.plan import plan_run
from efftrain_cli.recipe.recipe import load_recipe
from efftrain_cli.tune_warmup.printing import show_plan
from efftrain_cli.tune_warmup.probe import Probe, Receipt
from efftrain_cli.tune_warmup.search import Finder, Search
from tests.tune_warmup.answers import (
    BATCH,
    BUDGET,
    FULL,
    KINDS,
    LR,
    RAMP,
    SLW,
    TWO,
    WINDOW,
    answered,
    options,
    ordered,
    recipe,
)


def test_seeds_vote_and_the_share_is_said_with_its_error():
    search = options(SLW, seeds=(0, 1, 2))
    outcome, receipts = answered(
        search, lambda probe: 2 * WINDOW if probe.seed == 1 or probe.steps > 80 else None
    )
    assert (outcome.start, outcome.steps) == (8, 80)
    vote = (
        "stable by majority, on 2 of 3 seeds (95 % interval of the share 21% to 94%), unstable"
        " first at step 40"
    )
    assert f"start 8, 80 steps, seen for 60: {vote}" in outcome.statement
    # Two seeds that agree are enough. The third could be either: Wilson's intervals of 0 and 1 of
    # 3.
    further = [receipt for receipt in receipts.values() if receipt.probe.steps == 110]
    assert [receipt.probe.seed for receipt in further] == [0, 1]
    assert (
        "unstable by majority, stable on 0 of 2 seeds probed, 3 given (95 % interval of the share"
        " 0% to 79%)" in outcome.statement
    )
    # A tie is not stability.
    tied, _ = answered(
        options(SLW, seeds=(0, 1)), lambda probe: 2 * WINDOW if probe.seed == 0 else None
    )
    assert tied.start is None
    # The first failure of two decides: the second would cost and say nothing.
    _, receipts = answered(options(SLW, seeds=(0, 1)), lambda probe: 1 if probe.seed == 0 else None)
    assert {receipt.probe.seed for receipt in receipts.values()} == {0}


@pytest.mark.parametrize("seeds", [3, 5])
def test_the_interval_covers_the_share_though_seeds_end_with_the_majority(seeds):
    """Over every order of verdicts, weighed by its chance: as often as Wilson's interval of all
    seeds covers, or more."""
    search = options(SLW, seeds=tuple(range(seeds)))
    for share in (0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9):
        covered = wilson = 0.0
        for verdicts in itertools.product((True, False), repeat=seeds):
            chance = math.prod(share if stable else 1 - share for stable in verdicts)
            receipts = (seen(8, 80, seed, stable) for seed, stable in enumerate(verdicts))
            answer = Finder(search, list(receipts), never).judge(8, 80, WINDOW)
            low, high = (
                float(text.rstrip("%")) / 100
                for text in re.findall(r"(\d+%) to (\d+%)", str(answer))[0]
            )
            covered += chance * (low - 0.005 <= share <= high + 0.005)
            fixed = stats.binomtest(sum(verdicts), seeds).proportion_ci(method="wilson")
            wilson += chance * (fixed.low <= share <= fixed.high)
        assert covered >= wilson - 1e-9


def never(probe: Probe) -> Receipt:
    raise AssertionError(f"{probe.name} is known")


def seen(start: int, steps: int, seed: int, stable: bool) -> Receipt:
    """The receipt of a probe seen for the learning-rate warmup."""
    probe = Probe(start=start, steps=steps, seed=seed, horizon=WINDOW)
    return Receipt(
        probe=probe,
        stable=stable,
        max_fluctuation=1.0,
        fluctuation_step=WINDOW,
        stopped_at_step=WINDOW,
        tokens=SLW.tokens_of(probe),
        seconds=1.0,
        curve=(),
    )


def test_durations_end_where_the_share_of_the_budget_does():
    for share in (0.2, 0.66, 1.0):
        grid = options(SLW, max_share=share)
        longest = grid.durations(8)[-1]
        assert (
            SeqLenWarmup(start=8, steps=longest).tokens_through(longest, FULL, BATCH)
            <= share * BUDGET
        )
        longer = round(1.5 * longest)
        assert (
            SeqLenWarmup(start=8, steps=longer).tokens_through(longer, FULL, BATCH) > share * BUDGET
        )


@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_on_the_grid_differ_by_about_the_root_of_two(kind):
    grid = KINDS[kind]
    durations = grid.durations(grid.starts[0])
    assert len(durations) >= 6
    # Below ten, whole steps are coarser.
    ratios = [max(pair) / min(pair) for pair in itertools.pairwise(durations) if min(pair) >= 10]
    assert all(1.3 <= ratio <= 1.5 for ratio in ratios), ratios
    assert list(grid.starts) == sorted(set(grid.starts))
    assert durations == tuple(sorted(durations, reverse=kind == "lr"))


def test_probes_differ_from_the_recipe_in_the_setting_and_the_bookkeeping_alone():
    made = SLW.recipe_of(Probe(start=16, steps=60, seed=5, horizon=60))
    assert made.seq_len_warmup == SeqLenWarmup(start=16, steps=60)
    assert made.optim == SLW.recipe.optim
    assert made.train == SLW.recipe.train
    assert (made.eval.every, made.seed) == (WINDOW // 10, 5)
    assert SLW.recipe_with(16, 60).eval == SLW.recipe.eval
    two = TWO.recipe_with(16, 60).seq_len_warmup
    assert two == SeqLenWarmup(pacing="discrete", lengths=(16, FULL), until=(60,))
    assert LR.recipe_with(0, 60).optim.warmup_steps == 60


def test_a_ramp_is_searched_in_steps_and_set_in_sequences():
    ramp = RAMP.recipe_with(4, 60).batch_size_warmup
    assert ramp is not None
    assert ramp.start == 4
    assert abs(ramp.steps_of_ramp(BATCH) - 60) <= 3
    assert RAMP.recipe_with(*RAMP.own) == RAMP.recipe


def test_two_stages_are_seen_beyond_the_switch_and_a_learning_rate_beyond_its_peak():
    assert TWO.horizon(8, 80) == 80 + 2 * WINDOW
    assert TWO.horizon(8, 10) == WINDOW + 2 * WINDOW
    assert LR.horizon(0, WINDOW) == 3 * WINDOW
    assert LR.horizon(0, 57) == 57 + 2 * WINDOW
    # Never beyond the run's end.
    last = TWO.durations(8)[-1]
    short = Search(recipe=recipe("seq_len_warmup={start = 8, steps = 80}"), multiples=100)
    end = max(plan.step for plan, _ in plan_run(short.recipe))
    assert short.horizon(8, 80) == end
    assert TWO.horizon(8, last) <= max(plan.step for plan, _ in plan_run(TWO.recipe_with(8, last)))


def test_no_stable_setting_is_said():
    outcome, receipts = answered(SLW, ordered(SLW, math.inf, 0))
    assert (outcome.start, outcome.steps) == (None, None)
    assert "No seq_len_warmup.start that was probed is stable" in outcome.statement
    assert all(
        f"start {receipt.probe.start}, 80 steps, seen for {WINDOW}: unstable at step {WINDOW}"
        in outcome.statement
        for receipt in receipts.values()
    )
    assert {receipt.probe.horizon for receipt in receipts.values()} == {WINDOW}
    outcome, _ = answered(SLW, ordered(SLW, 8, 0))
    assert (outcome.start, outcome.steps) == (None, None)
    assert outcome.statement.startswith("No duration that was probed is stable. ")
    assert "Longer starts were not probed with them." in outcome.statement
    outcome, _ = answered(LR, ordered(LR, 0, math.inf))
    assert outcome.start is None and "lengthen" not in outcome.statement


@pytest.mark.parametrize("kind", KINDS)
def test_no_warmup_is_recommended_where_nothing_is_unstable(kind):
    search = KINDS[kind]
    outcome, receipts = answered(search, lambda probe: None, plain=None)
    if kind == "lr":
        assert outcome.steps == search.durations(0)[-1]
        assert "do not tell durations apart" in outcome.statement
        return
    assert (outcome.start, outcome.steps, outcome.verified) == (search.full, 0, True)
    assert outcome.statement.startswith("No warmup is needed for stability")
    plain = search.recipe_with(search.full, 0)
    assert plain.seq_len_warmup is None and plain.batch_size_warmup is None
    # It was probed itself, for as long as a duration is.
    (probed,) = (receipt for receipt in receipts.values() if not receipt.probe.steps)
    assert probed.stopped_at_step == 3 * WINDOW
    assert probed.tokens == 3 * WINDOW * BATCH * FULL
    # Training without a warmup is unstable, or too dear: the longest warmup is taken.
    longest = search.durations(search.starts[0])[-1]
    outcome, _ = answered(search, lambda probe: None, plain=WINDOW)
    assert (outcome.start, outcome.steps) == (search.starts[0], longest)
    assert f"without a warmup, seen for 60: unstable at step {WINDOW}." in outcome.statement
    spent = sum(receipt.tokens for receipt in receipts.values())
    outcome, _ = answered(options(search, budget=spent - 1), lambda probe: None, plain=None)
    assert (outcome.steps, outcome.needed) == (longest, spent)
    assert "without a warmup, seen for 60: not judged for want of budget." in outcome.statement


def test_one_seed_s_verdict_says_so():
    said = "This is one seed's verdict, another seed may say otherwise: --seeds 0..2 asks three."
    assert said in answered(SLW, ordered(SLW, 16, 80))[0].statement
    three = options(SLW, seeds=(0, 1, 2))
    assert said not in answered(three, ordered(three, 16, 80))[0].statement


def test_a_recipe_without_a_warmup_is_searched_from_the_rule_of_thumb():
    search = Search(recipe=recipe())
    assert search.own == (8, BUDGET // (FULL * BATCH) // 3)
    outcome, _ = answered(search, lambda probe: None if probe.steps <= 104 else 2 * WINDOW)
    assert search.recipe_with(outcome.start, outcome.steps).seq_len_warmup == SeqLenWarmup(
        start=8, steps=104
    )  # type: ignore
    assert Search(recipe=load_recipe("gpt2-1.5b")).own[0] == 64
    two = Search(recipe=recipe(), tune="two-stage")
    assert two.recipe_with(*two.own).seq_len_warmup == SeqLenWarmup(
        pacing="discrete", lengths=(8, FULL), until=(104,)
    )


@pytest.mark.parametrize("name", ["gpt2-117m-slw", "gpt2-1.5b-slw", "gpt3-125m-slw"])
def test_a_tenth_of_a_run_verifies_the_recipe_s_own_setting(name):
    search = Search(recipe=load_recipe(name))
    smallest = search.smallest_budget()
    assert smallest <= search.recipe.train.tokens / 10
    # Its probe to the horizon, by the plan itself.
    horizon = 3 * search.recipe.optim.warmup_steps
    after = next(after for plan, after in plan_run(search.recipe) if plan.step == horizon)
    assert smallest == after.tokens


def test_a_plan_counts_starts_durations_and_their_costs(capsys):
    """In 60 steps from 8 tokens, 0.7 more a step, down to multiples of 8: 11 steps of 8 tokens, 11
    of 16, 12 of 24, 11 of 32, 12 of 40 and 3 of 48 are 1,528, in a batch of 10. The dearest climb
    of 20 steps and the dearest probe of 60 are those of full length, 12,800 and 38,400 tokens. Of
    five starts every second one, the last and one step back; of nine durations at most four after
    the first, and no warmup."""
    show_plan(make_console(), SLW)
    shown = " ".join(capsys.readouterr().out.split())
    assert "seq_len_warmup.start from 8 to 48 tokens, then" in shown
    assert "from 20 to 320 steps" in shown and "first start 8, 80 steps" in shown
    assert "cost 15.3K tokens (7.6% of a full run) to verify start 8, 80 steps" in shown
    assert (
        "at most 10 probes, 282K tokens (140.8% of a full run): 4 for the start and 6 for" in shown
    )
    assert "the smallest sensible one is --budget 7.7%" in shown


DISCRETE = "seq_len_warmup={pacing = 'discrete', lengths = "


@pytest.mark.parametrize(
    "override, changed, said",
    [
        ("optim.warmup_steps=0", {}, "optim.warmup_steps is 0"),
        (
            "optim.warmup_steps=5000",
            {},
            "too small to search(.|\n)*of it\n  raise train.tokens or --max-share",
        ),
        (
            "simigrad={target = 0.5, min_batch_size = 2, max_batch_size = 20}",
            {},
            "simigrad=false",
        ),
        (DISCRETE + "[8, 64], until = [5]}", {"tune": "length"}, "discrete"),
        (DISCRETE + "[8, 16, 64], until = [5, 9]}", {}, "3 lengths"),
        ("seq_len_warmup.steps=9", {"tune": "two-stage"}, "no lengths"),
        ("seq_len_warmup.steps=9", {"tune": "batch"}, r"needs a \[batch_size_warmup\]"),
        (
            "batch_size_warmup={start = 2, increment = 2, sequences = 9}",
            {"tune": "length"},
            "cannot be combined",
        ),
        ("seq_len_warmup={start = 64, steps = 5}", {}, "no seq_len_warmup.start to search"),
        ("seed=1", {"threshold": 1.0}, "--threshold 1(.|\n)*search\n  give mult"),
        ("seed=1", {"multiples": 0}, "--multiples 0"),
        ("seed=1", {"max_share": 1.5}, "--max-share 1.5"),
    ],
)
def test_what_cannot_be_searched_is_refused(override, changed, said):
    with pytest.raises(UsageError, match=said):
        Search(recipe=recipe(override), **changed)
