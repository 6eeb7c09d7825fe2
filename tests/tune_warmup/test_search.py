"""The search of tune-warmup against every answer that probes could give."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from efftrain_cli.run.stability import fluctuation
from efftrain_cli.tune_warmup.probe import Probe, Receipt
from efftrain_cli.tune_warmup.search import Outcome, Search
from tests.tiny import changed
from tests.tune_warmup.answers import (
    BUDGET,
    KINDS,
    LAST,
    LR,
    SLW,
    WINDOW,
    answered,
    first_probe,
    hashed,
    options,
    ordered,
    recipe,
    tokens_by_plan,
)


@pytest.mark.parametrize("kind", KINDS)
def test_the_shortest_stable_start_and_the_furthest_stable_duration_are_found(kind):
    search = KINDS[kind]
    for start in search.starts:
        durations = search.durations(start)
        for at, steps in enumerate(durations):
            outcome, receipts = answered(search, ordered(search, start, steps))
            assert (outcome.start, outcome.steps, outcome.verified, outcome.needed is None) == (
                start,
                steps,
                True,
                True,
            )
            # The setting was itself probed to its end and stable; the next further one was probed
            # and was not.
            name = Probe(start=start, steps=steps, seed=1234, horizon=1).name
            assert receipts[name].stopped_at_step == search.horizon(start, steps)
            if at + 1 < len(durations):
                assert not receipts[
                    Probe(start=start, steps=durations[at + 1], seed=1234, horizon=1).name
                ].stable
                further = durations[at + 1]
                named = (
                    f"{search.named(start, f'{further:,}')}, seen for"
                    f" {search.horizon(start, further):,}"
                )
                assert f"{named}: unstable at" in outcome.statement
            else:
                assert "allowed" in outcome.statement


def test_a_probe_ends_with_the_run():
    """Steps of 640 tokens: the budget of 200,000 is reached by step 313, of 199,680 by step 312."""
    for budget, last in ((200_000, 313), (199_680, 312), (199_681, 313)):
        made = changed(LR.recipe, f"train.tokens={budget}")
        grid = Search(recipe=made, tune="lr", multiples=30)
        assert grid.horizon(1, 20) == last


def test_the_recipe_s_own_setting_is_probed_first():
    for search in KINDS.values():
        probe = first_probe(search)
        assert isinstance(probe, Probe)
        assert (probe.start, probe.steps) == search.own
        assert search.recipe_of(probe).methods == search.recipe.methods
        assert search.recipe_of(probe).optim == search.recipe.optim


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seeds", [(), (0, 1, 2)])
def test_the_plan_says_how_many_probes_and_tokens_at_most(kind, seeds):
    search = options(KINDS[kind], seeds=seeds)
    of_starts, of_durations = search.most_probes()
    for start in (*search.starts, math.inf):
        nothing = math.inf if kind == "lr" else 0
        for steps in (*search.durations(search.starts[0]), nothing):
            _, receipts = answered(search, ordered(search, start, steps), plain=None)
            probed = {receipt.probe.start for receipt in receipts.values()} - {search.full}
            assert kind == "lr" or len(probed) * len(search.all_seeds) <= of_starts
            assert len(receipts) <= of_starts + of_durations
            assert sum(r.tokens for r in receipts.values()) <= search.most_tokens()


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_of_a_probe_are_those_of_its_plan(kind):
    grid = KINDS[kind]
    for start, steps in itertools.islice(grid.settings(), 0, None, 3):
        probe = Probe(start=start, steps=steps, seed=1, horizon=1)
        for step in (1, WINDOW, grid.horizon(start, steps)):
            assert grid.tokens(start, steps, step) == tokens_by_plan(KINDS[kind], probe, step)


@settings(deadline=None, derandomize=True, database=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    draw=st.integers(0, 10**6),
    share=st.floats(0, 1),
    budget=st.one_of(st.none(), st.integers(1, 2 * BUDGET)),
    seeds=st.sampled_from([(), (0, 1), (0, 1, 2)]),
)
def test_whatever_the_answers_the_search_ends_within_its_budget_and_claims_what_was_probed(
    kind, draw, share, budget, seeds
):
    search = options(KINDS[kind], budget=budget, seeds=seeds)
    outcome, receipts = answered(search, hashed(draw, share))
    if budget is not None:
        assert sum(receipt.tokens for receipt in receipts.values()) <= budget
    if outcome.verified:
        assert outcome.start is not None and outcome.steps is not None
        horizon = search.horizon(outcome.start, outcome.steps)
        votes = [
            receipt.stable or receipt.fluctuation_step > horizon
            for receipt in receipts.values()
            if (receipt.probe.start, receipt.probe.steps) == (outcome.start, outcome.steps)
            and receipt.stopped_at_step >= min(horizon, receipt.fluctuation_step)
        ]
        assert 2 * sum(votes) > len(search.all_seeds)
        assert "NOT VERIFIED" not in outcome.statement
    elif outcome.start is not None:
        assert outcome.needed is not None and budget is not None
        own = (outcome.start, outcome.steps) == search.own
        assert outcome.statement.startswith(
            f"NOT VERIFIED, {'a rule of thumb' if own else 'only the next to be probed'}"
        )
        assert ("own setting" in outcome.statement) == own
    else:
        assert any(not receipt.stable for receipt in receipts.values())
    # Every setting that the statement calls stable or unstable belongs to a probe that was seen for
    # so long.
    of_probes = {"without a warmup" if not r.probe.steps else "" for r in receipts.values()}
    of_probes |= {search.named(r.probe.start, f"{r.probe.steps:,}") for r in receipts.values()}
    _, _, probed = outcome.statement.partition(" Probed: ")
    for setting, verdict in re.findall(r"(?:^|; )(.+?), seen for [\d,]+: (\w+)", probed):
        assert verdict == "not" or setting in of_probes


def test_a_failure_of_every_duration_is_said_with_the_start_it_was_tried_from():
    """From 8 tokens the recipe's own duration alone survives the climb, and fails later."""
    outcome, _ = answered(SLW, lambda probe: 2 * WINDOW if probe.steps == 80 else WINDOW // 2)
    assert outcome.start is None
    assert "Longer starts were not probed with them." in outcome.statement


def test_a_failure_after_the_climb_shortens_the_duration_and_leaves_the_start():
    outcome, receipts = answered(SLW, lambda probe: 2 * WINDOW if probe.steps > 40 else None)
    assert (outcome.start, outcome.steps) == (8, 40)
    assert {receipt.probe.start for receipt in receipts.values()} == {8}


def test_a_survivor_goes_on_from_where_it_stands():
    first = first_probe(SLW)
    assert isinstance(first, Probe) and first.horizon == WINDOW
    _, receipts = answered(SLW, lambda probe: None)
    assert receipts[first.name].probe.horizon == 3 * WINDOW
    assert sum(receipt.probe.steps == 80 for receipt in receipts.values()) == 1, (
        "the start's probe and the duration's are one"
    )


def curved(
    search: Search, losses: Callable[[Probe, int], float]
) -> tuple[Outcome, dict[str, Receipt]]:
    """The search where a probe's validation loss at a step, every two steps, is `losses(probe,
    step)`: judged as the command does."""
    jumps: dict[tuple[int, int, int], float | None] = {}

    def fails(probe: Probe) -> float | None:
        key = (probe.start, probe.steps, probe.seed)
        if key not in jumps:
            curve = [
                (step, losses(probe, step))
                for step in range(0, search.horizon(probe.start, probe.steps) + 1, 2)
            ]
            ends = (
                end
                for end in range(1, len(curve) + 1)
                if fluctuation(curve[:end])[0] > search.threshold
            )
            jumps[key] = next((curve[end - 1][0] for end in ends), None)
        return jumps[key]

    return answered(search, fails)


def test_curves_that_jump_while_the_learning_rate_climbs_raise_the_start():
    def losses(probe: Probe, step: int) -> float:
        jump = 2 * WINDOW + 4 if probe.start >= 24 else WINDOW - 4
        return 9.0 if step == jump and (probe.start < 24 or probe.steps > 160) else 9 - 0.05 * step

    outcome, _ = curved(SLW, losses)
    longest = max(steps for steps in SLW.durations(24) if steps <= 160)
    assert (outcome.start, outcome.steps, outcome.verified) == (24, longest, True)
    assert f"start 8, 80 steps, seen for 20: unstable at step {WINDOW - 4};" in outcome.statement
    assert "unstable at step 44" in outcome.statement


def test_a_budget_returns_the_best_that_was_verified():
    own = SLW.tokens(8, 80, 3 * WINDOW)
    assert own == SLW.smallest_budget()
    outcome, receipts = answered(options(SLW, budget=own), lambda probe: None)
    assert (outcome.start, outcome.steps, outcome.verified, outcome.needed is None) == (
        8,
        80,
        True,
        False,
    )
    assert "budget ended before 110 steps could be judged" in outcome.statement
    outcome, receipts = answered(options(SLW, budget=own - 1), lambda probe: None)
    assert (outcome.start, outcome.steps, outcome.verified) == (8, 80, False)
    assert (
        "NOT VERIFIED, a rule of thumb" in outcome.statement
        and "start 8, 80 steps, seen for 20: stable; " in outcome.statement
    )
    assert [receipt.probe.horizon for receipt in receipts.values()] == [WINDOW]
    outcome, receipts = answered(options(SLW, budget=1), lambda probe: None)
    assert (outcome.start, outcome.steps, outcome.verified, receipts) == (8, 80, False, {})
    assert "seen for 20: not judged for want of budget." in outcome.statement
    # What is known to be unstable is not offered.
    outcome, _ = answered(
        options(SLW, budget=own), lambda probe: 3 * WINDOW if probe.steps >= 80 else None
    )
    assert outcome.steps is not None and outcome.steps < 80 and not outcome.verified
    assert "start 8, 80 steps, seen for 60: unstable at step 60" in outcome.statement


def test_a_budget_too_small_for_the_longest_says_so():
    assert LAST.own[1] == LAST.durations(8)[-1]
    outcome, _ = answered(options(LAST, budget=LAST.smallest_budget() - 1), lambda probe: None)
    assert (outcome.start, outcome.steps, outcome.verified, outcome.needed is None) == (
        8,
        350,
        False,
        False,
    )
    near = Search(recipe=recipe("seq_len_warmup={start = 8, steps = 240}"))
    assert near.durations(8)[-2] == 240
    outcome, _ = answered(options(near, budget=near.smallest_budget()), lambda probe: None)
    assert (outcome.steps, outcome.verified, outcome.needed is None) == (240, True, False)
    assert "before 340 steps could be judged" in outcome.statement


def test_starts_are_named_with_what_is_known_of_them():
    outcome, _ = answered(SLW, ordered(SLW, 24, 57))
    for start in (8, 16):
        assert f"start {start}, 80 steps, seen for 20: unstable at step 20;" in outcome.statement
    enough = sum(SLW.tokens(start, 80, WINDOW) for start in (8, 24))
    outcome, receipts = answered(options(SLW, budget=enough), ordered(SLW, 24, 57))
    assert [receipt.probe.start for receipt in receipts.values()] == [8, 24]
    assert (outcome.start, outcome.verified) == (24, False)
    assert outcome.needed == enough + SLW.tokens(16, 80, WINDOW)
    assert "start 16, 80 steps, seen for 20: not judged for want of budget" in outcome.statement
    assert (
        "only the next to be probed" in outcome.statement
        and "recipe's own" not in outcome.statement
    ), "its start is 8"
    outcome, _ = answered(options(SLW, budget=enough - 1), ordered(SLW, 24, 57))
    assert (outcome.start, outcome.verified) == (24, False)
    assert "start 8, 80 steps, seen for 20: unstable at step 20;" in outcome.statement


def test_more_budget_goes_on_where_less_ended():
    fails = ordered(SLW, 8, 110)
    little, receipts = answered(options(SLW, budget=SLW.smallest_budget()), fails)
    some, enough = list(receipts.values()), little.needed
    assert enough == sum(receipt.tokens for receipt in some) + SLW.tokens(8, 110, 3 * WINDOW)
    again = first_probe(SLW, some)
    assert isinstance(again, Probe) and again.name not in receipts
    assert first_probe(options(SLW, budget=enough), some) == again
    assert isinstance(first_probe(options(SLW, budget=enough - 1), some), Outcome)
    whole, _ = answered(SLW, fails, before=some)
    assert (whole.start, whole.steps, whole.needed) == (8, 110, None)
