"""The search of tune-warmup against every answer that probes could give."""

from __future__ import annotations

import itertools
import math

import pytest

from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.methods.batch_size_warmup import BatchSizeWarmup
from efftrain_cli.methods.seq_len_warmup import SeqLenWarmup
from efftrain_cli.plan.plan import plan_run
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.recipe.sections import Model, Optim, Train
from efftrain_cli.tune_warmup.search import Outcome, Probe, Receipt, Search, fluctuation

FULL, BATCH, BUDGET, WINDOW = 64, 10, 200_000, 20


def recipe(**sections: object) -> Recipe:
    return Recipe(
        model=Model(n_layer=1, n_head=1, n_embd=8, seq_len=FULL),
        optim=Optim(lr=1e-3, **{"warmup_steps": WINDOW, **sections.pop("optim", {})}),  # type: ignore
        train=Train(tokens=BUDGET, batch_size=BATCH),
        **sections,
    )


SLW = Search(recipe=recipe(seq_len_warmup=SeqLenWarmup(start=8, steps=40)))
RAMP = Search(recipe=recipe(batch_size_warmup=BatchSizeWarmup(start=2, increment=2, sequences=100)))


def receipt(probe: Probe, stable: bool) -> Receipt:
    return Receipt(
        probe=probe,
        stable=stable,
        max_fluctuation=1.0 if stable else 2.0,
        fluctuation_step=1,
        stopped_at_step=probe.horizon,
        tokens=1,
        seconds=1.0,
        curve=(),
    )


def follow(search: Search, first_start: float, longest: float) -> tuple[Outcome, list[Probe]]:
    """The search where starts from `first_start` on, and durations up to `longest`, are stable."""
    receipts: list[Receipt] = []
    while isinstance(probe := search.next(receipts), Probe):
        stable = probe.start >= first_start if probe.phase == "start" else probe.steps <= longest
        receipts.append(receipt(probe, stable))
    return probe, [receipt.probe for receipt in receipts]


@pytest.mark.parametrize("search", [SLW, RAMP])
def test_the_shortest_stable_start_and_the_longest_stable_duration_are_found(search: Search) -> None:
    for start in search.starts:
        for steps in search.durations(start):
            outcome, probes = follow(search, start, steps)
            assert (outcome.start, outcome.steps) == (start, steps)
            assert len(set(probes)) == len(probes), "a probe was repeated"
            # The setting found was itself probed and stable, and the next longer one was probed and was not.
            asked = {probe.steps for probe in probes if probe.phase == "steps"}
            assert steps in asked
            assert steps == search.durations(start)[-1] or steps + WINDOW in asked


@pytest.mark.parametrize("search", [SLW, RAMP])
def test_the_worst_case_is_one_and_is_never_exceeded(search: Search) -> None:
    worst = search.worst_case()
    thresholds = [(start, steps) for start in (*search.starts, math.inf) for steps in (0, *search.durations(search.starts[0]))]
    taken = [follow(search, start, steps)[1] for start, steps in thresholds]
    assert max(map(len, taken)) == worst.probes
    assert max(sum(map(search.tokens_of, probes)) for probes in taken) == worst.tokens
    first = [probes for (start, _), probes in zip(thresholds, taken, strict=True) if start == search.starts[0]]
    assert max(map(len, first)) == search.if_start_is_stable().probes


def test_what_is_left_shrinks_to_nothing() -> None:
    receipts: list[Receipt] = []
    left = [SLW.worst_case(receipts)]
    while isinstance(probe := SLW.next(receipts), Probe):
        receipts.append(receipt(probe, probe.phase == "start" and probe.start >= 24))
        left.append(SLW.worst_case(receipts))
    assert all(after.probes < before.probes for before, after in itertools.pairwise(left))
    assert all(after.tokens <= before.tokens for before, after in itertools.pairwise(left))
    assert left[-1] == (0, 0)


@pytest.mark.parametrize("search", [SLW, RAMP])
def test_the_tokens_of_a_probe_are_those_of_its_plan(search: Search) -> None:
    for probe in (search.probe_of_start(search.starts[1]), search.probe_of_steps(search.starts[0], 2 * WINDOW)):
        after = next(after for plan, after in plan_run(search.recipe_of(probe)) if plan.step == probe.horizon)
        assert search.tokens_of(probe) == after.tokens


def test_durations_end_where_the_share_of_the_budget_does() -> None:
    for share in (0.2, 0.66, 1.0):
        search = Search(recipe=SLW.recipe, max_share=share)
        longest = search.durations(8)[-1]
        assert SeqLenWarmup(start=8, steps=longest).tokens_through(longest, FULL, BATCH) <= share * BUDGET
        longer = longest + WINDOW
        assert SeqLenWarmup(start=8, steps=longer).tokens_through(longer, FULL, BATCH) > share * BUDGET


def test_probes_differ_from_the_recipe_in_the_warmup_and_the_bookkeeping_alone() -> None:
    probe = SLW.probe_of_steps(16, 60)
    made = SLW.recipe_of(probe)
    assert made.seq_len_warmup == SeqLenWarmup(start=16, steps=60)
    assert made.optim == SLW.recipe.optim
    assert made.train == SLW.recipe.train
    assert made.eval.every == WINDOW // 10
    assert SLW.recipe_with(16, 60).eval == SLW.recipe.eval


def test_a_ramp_is_searched_in_steps_and_set_in_sequences() -> None:
    ramp = RAMP.recipe_with(4, 60).batch_size_warmup
    assert ramp is not None
    assert ramp.start == 4
    assert abs(ramp.steps_of_ramp(BATCH) - 60) <= 3


def test_no_stable_setting_is_said() -> None:
    outcome, probes = follow(SLW, math.inf, 0)
    assert (outcome.start, outcome.steps) == (None, None)
    assert "No start is stable" in outcome.statement
    assert {probe.phase for probe in probes} == {"start"}
    outcome, _ = follow(SLW, 8, 0)
    assert (outcome.start, outcome.steps) == (None, None)
    assert "No duration is stable" in outcome.statement


def test_that_all_are_stable_is_said() -> None:
    outcome, probes = follow(SLW, 0, math.inf)
    assert len(probes) == 2
    assert "Every setting tried is stable" in outcome.statement
    assert "Every setting" not in follow(SLW, 16, math.inf)[0].statement


def test_a_recipe_without_a_warmup_is_searched_for_a_sequence_length_warmup() -> None:
    outcome, _ = follow(Search(recipe=recipe()), 0, 40)
    made = Search(recipe=recipe()).recipe_with(outcome.start, outcome.steps)  # type: ignore
    assert made.seq_len_warmup == SeqLenWarmup(start=8, steps=40)


@pytest.mark.parametrize(
    ("sections", "options", "said"),
    [
        ({"optim": {"warmup_steps": 0}}, {}, "optim.warmup_steps is 0"),
        ({"optim": {"warmup_steps": 5000}}, {}, "too small to search"),
        ({"seq_len_warmup": SeqLenWarmup(pacing="discrete", lengths=(8, 64), until=(5,))}, {}, "discrete"),
        ({"seq_len_warmup": SeqLenWarmup(start=64, steps=5)}, {}, "no seq_len_warmup.start to search"),
        ({}, {"threshold": 1.0}, "--threshold 1"),
        ({}, {"multiples": 0}, "--multiples 0"),
        ({}, {"max_share": 1.5}, "--max-share 1.5"),
    ],
)
def test_what_cannot_be_searched_is_refused(sections: dict, options: dict, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Search(recipe=recipe(**sections), **options)


def test_fluctuation_is_perplexity_over_the_best_before() -> None:
    log = math.log
    assert fluctuation([(0, log(100)), (5, log(50)), (10, log(60)), (15, log(40)), (20, log(60))]) == (pytest.approx(1.5), 20)
    assert fluctuation([(0, log(100)), (5, log(90))]) == (pytest.approx(0.9), 5)
    assert fluctuation([(0, 5.0)]) == (0.0, 0)
    assert fluctuation([(0, 5.0), (5, math.inf), (10, 1.0)]) == (math.inf, 5)
    assert fluctuation([(0, 5.0), (5, math.nan)]) == (math.inf, 5)
    assert fluctuation([(0, 1.0), (5, 5000.0)])[1] == 5
