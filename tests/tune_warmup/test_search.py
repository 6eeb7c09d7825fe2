"""The search of tune-warmup against every answer that probes could give."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.methods.batch_size_warmup import BatchSizeWarmup
from efftrain_cli.methods.seq_len_warmup import SeqLenWarmup
from efftrain_cli.methods.simigrad import SimiGrad
from efftrain_cli.plan.plan import plan_run
from efftrain_cli.recipe.recipe import Recipe, load_recipe
from efftrain_cli.recipe.sections import Model, Optim, Train
from efftrain_cli.tune_warmup.inquiry import Outcome, Question
from efftrain_cli.tune_warmup.search import Probe, Receipt, Search
from efftrain_cli.tune_warmup.verdict import fluctuation

FULL, BATCH, BUDGET, WINDOW = 64, 10, 200_000, 20


def recipe(**sections: object) -> Recipe:
    return Recipe(
        model=Model(n_layer=1, n_head=1, n_embd=8, seq_len=FULL),
        optim=Optim(lr=1e-3, **{"warmup_steps": WINDOW, **sections.pop("optim", {})}),  # type: ignore
        train=Train(tokens=BUDGET, batch_size=BATCH),
        **sections,
    )


SLW = Search(recipe=recipe(seq_len_warmup=SeqLenWarmup(start=8, steps=80)))
RAMP = Search(recipe=recipe(batch_size_warmup=BatchSizeWarmup(start=2, increment=2, sequences=400)))
TWO = Search(recipe=recipe(seq_len_warmup=SeqLenWarmup(pacing="discrete", lengths=(8, FULL), until=(80,))))
LR = Search(recipe=recipe(), tune="lr")
FILLED = Search(recipe=recipe(seq_len_warmup=SeqLenWarmup(start=8, steps=80, batch="tokens")))
LAST = Search(recipe=recipe(seq_len_warmup=SeqLenWarmup(start=8, steps=350)))
KINDS = {
    "length": SLW,
    "length, the recipe's own the longest": LAST,
    "length at constant tokens": FILLED,
    "batch": RAMP,
    "two-stage": TWO,
    "lr": LR,
}
Fails = Callable[[int, int], "float | None"]


def options(search: Search, **changed: object) -> Search:
    from dataclasses import replace

    return replace(search, **changed)  # type: ignore[arg-type]


def answered(
    search: Search, fails: Callable[[Probe], float | None], limit: int = 60
) -> tuple[Outcome, dict[str, Receipt]]:
    """The search where a probe is unstable at step fails(probe), or never; receipts by name, in the order of the first
    question."""
    receipts: dict[str, Receipt] = {}
    for _ in range(limit):
        probe = search.next(list(receipts.values()))
        if isinstance(probe, Outcome):
            return probe, receipts
        before = receipts.get(probe.name)
        assert before is None or (before.stable and before.stopped_at_step < probe.horizon), "asked for what is known"
        failure = fails(probe)
        unstable = failure is not None and failure <= probe.horizon
        stopped = int(failure) if unstable and failure is not None else probe.horizon
        receipts[probe.name] = Receipt(
            probe=probe,
            stable=not unstable,
            max_fluctuation=2.0 if unstable else 1.0,
            fluctuation_step=stopped,
            stopped_at_step=stopped,
            tokens=tokens_by_plan(search, probe, stopped),
            seconds=1.0,
            curve=(),
        )
    raise AssertionError("the search does not end")


_COUNTED: dict[tuple[str, int, int], list[int]] = {}


def tokens_by_plan(search: Search, probe: Probe, step: int) -> int:
    """Tokens trained at the end of a step by the plan of the probe's recipe, step by step."""
    key = (repr(search.recipe), probe.start, probe.steps)
    if key not in _COUNTED:
        _COUNTED[key] = [0, *(after.tokens for _, after in plan_run(search.recipe_of(probe)))]
    counted = _COUNTED[key]
    return counted[min(step, len(counted) - 1)]


def ordered(search: Search, first_start: float, furthest: float) -> Callable[[Probe], float | None]:
    """Starts from `first_start` on are stable at the very beginning, and durations up to `furthest` to the end."""

    def fails(probe: Probe) -> float | None:
        if probe.start < first_start:
            return WINDOW
        beyond = probe.steps < furthest if search.kind == "lr" else probe.steps > furthest
        return search.grid.horizon(probe.start, probe.steps) if beyond else None

    return fails


@pytest.mark.parametrize("kind", KINDS)
def test_the_shortest_stable_start_and_the_furthest_stable_duration_are_found(kind: str) -> None:
    search = KINDS[kind]
    grid = search.grid
    for start in grid.starts:
        durations = grid.durations(start)
        for at, steps in enumerate(durations):
            outcome, receipts = answered(search, ordered(search, start, steps))
            assert (outcome.start, outcome.steps, outcome.verified, outcome.complete) == (start, steps, True, True)
            # The setting was itself probed to its end and stable; the next further one was probed and was not.
            name = Probe(start=start, steps=steps, seed=1234, horizon=1).name
            assert receipts[name].stopped_at_step == grid.horizon(start, steps)
            if at + 1 < len(durations):
                assert not receipts[Probe(start=start, steps=durations[at + 1], seed=1234, horizon=1).name].stable
                assert f"{durations[at + 1]:,} steps: unstable" in outcome.statement
            else:
                assert "allowed" in outcome.statement


def test_the_recipe_s_own_setting_is_probed_first() -> None:
    for search in KINDS.values():
        probe = search.next([])
        assert isinstance(probe, Probe)
        assert (probe.start, probe.steps) == search.grid.own
        assert search.recipe_of(probe).methods == search.recipe.methods
        assert search.recipe_of(probe).optim == search.recipe.optim


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seeds", [(), (0, 1, 2)])
def test_what_the_plan_says_at_most_is_reached_and_never_exceeded(kind: str, seeds: tuple[int, ...]) -> None:
    search = options(KINDS[kind], seeds=seeds)
    grid = search.grid
    spent = []
    for start in (*grid.starts, math.inf):
        nothing = math.inf if kind == "lr" else 0
        for steps in (
            *grid.durations(grid.starts[0]),
            *(grid.durations(int(start)) if start < math.inf else ()),
            nothing,
        ):
            _, receipts = answered(search, ordered(search, start, steps))
            spent.append(sum(receipt.tokens for receipt in receipts.values()))
    assert max(spent) == search.worst_case().tokens
    own, receipts = answered(search, ordered(search, *grid.own))
    assert (own.start, own.steps) == grid.own
    assert sum(receipt.tokens for receipt in receipts.values()) == search.own_cost(late=True).tokens


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_of_a_probe_are_those_of_its_plan(kind: str) -> None:
    grid = KINDS[kind].grid
    for start, steps in itertools.islice(grid.settings(), 0, None, 3):
        probe = Probe(start=start, steps=steps, seed=1, horizon=1)
        for step in (1, WINDOW, grid.horizon(start, steps)):
            assert grid.tokens(start, steps, step) == tokens_by_plan(KINDS[kind], probe, step)


def hashed(seed: int, share: float) -> Callable[[Probe], float | None]:
    """Verdicts without any order: a share of the probes is unstable, at any step."""

    def fails(probe: Probe) -> float | None:
        draw = crc32(f"{seed} {probe.start} {probe.steps} {probe.seed}".encode())
        return 1 + draw % 97 if (draw >> 8) % 1000 < 1000 * share else None

    return fails


@given(
    kind=st.sampled_from(sorted(KINDS)),
    draw=st.integers(0, 10**6),
    share=st.floats(0, 1),
    budget=st.one_of(st.none(), st.integers(1, 2 * BUDGET)),
    seeds=st.sampled_from([(), (0, 1), (0, 1, 2)]),
)
def test_whatever_the_answers_the_search_ends_within_its_budget_and_claims_what_was_probed(
    kind: str, draw: int, share: float, budget: int | None, seeds: tuple[int, ...]
) -> None:
    search = options(KINDS[kind], budget=budget, seeds=seeds)
    outcome, receipts = answered(search, hashed(draw, share))
    if budget is not None:
        assert sum(receipt.tokens for receipt in receipts.values()) <= budget
    if outcome.verified:
        assert outcome.start is not None and outcome.steps is not None
        horizon = search.grid.horizon(outcome.start, outcome.steps)
        votes = [
            receipt.stable or receipt.fluctuation_step > horizon
            for receipt in receipts.values()
            if (receipt.probe.start, receipt.probe.steps) == (outcome.start, outcome.steps)
            and receipt.stopped_at_step >= min(horizon, receipt.fluctuation_step)
        ]
        assert 2 * sum(votes) > len(search.all_seeds)
        assert "NOT VERIFIED" not in outcome.statement
    elif outcome.start is not None:
        assert not outcome.complete and budget is not None
        own = (outcome.start, outcome.steps) == search.grid.own
        assert outcome.statement.startswith(
            f"NOT VERIFIED, {'a rule of thumb' if own else 'only the next to be probed'}"
        )
        assert ("own setting" in outcome.statement) == own
    else:
        assert any(not receipt.stable for receipt in receipts.values())
    # Every number of steps that the statement calls stable or unstable belongs to a probe.
    probed = {
        f"{receipt.probe.steps:,} steps: {verdict}"
        for receipt in receipts.values()
        for verdict in ("stable", "unstable")
    }
    for steps in {steps for _, steps in search.grid.settings()}:
        for verdict in ("stable", "unstable"):
            claim = f" {steps:,} steps: {verdict}"
            assert claim not in outcome.statement or claim.strip() in probed


def test_a_failure_while_the_learning_rate_climbs_raises_the_start() -> None:
    """The search at fault in an earlier form: from 8 tokens no duration is stable, from 48 on every one is."""

    def fails(probe: Probe) -> float | None:
        if probe.start >= 48:
            return None
        # The recipe's own duration survives the climb and fails later; every other fails at once.
        return 2 * WINDOW if probe.steps == 80 else WINDOW // 2

    outcome, receipts = answered(SLW, fails)
    assert (outcome.start, outcome.steps) == (48, SLW.grid.durations(48)[-1])
    assert {receipt.probe.start for receipt in receipts.values()} >= {8, 48}


def test_a_failure_after_the_climb_shortens_the_duration_and_leaves_the_start() -> None:
    outcome, receipts = answered(SLW, lambda probe: 2 * WINDOW if probe.steps > 40 else None)
    assert (outcome.start, outcome.steps) == (8, 40)
    assert {receipt.probe.start for receipt in receipts.values()} == {8}


def test_a_survivor_goes_on_from_where_it_stands() -> None:
    first = SLW.next([])
    assert isinstance(first, Probe) and first.horizon == WINDOW
    _, receipts = answered(SLW, lambda probe: None)
    assert receipts[first.name].probe.horizon == 3 * WINDOW
    assert sum(receipt.probe.steps == 80 for receipt in receipts.values()) == 1, (
        "the start's probe and the duration's are one"
    )


def test_verdicts_out_of_order_are_found_and_said() -> None:
    last = SLW.grid.durations(8)[-1]
    outcome, _ = answered(SLW, lambda probe: 2 * WINDOW if 80 < probe.steps < last else None)
    assert (outcome.start, outcome.steps) == (8, 80)
    assert f"stable again at {last:,} steps" in outcome.statement
    # Nothing shorter is stable: what is stable again is taken.
    outcome, _ = answered(SLW, lambda probe: 2 * WINDOW if probe.steps < last else None)
    assert (outcome.start, outcome.steps, outcome.verified) == (8, last, True)
    assert "not in order" in outcome.statement


def curved(search: Search, losses: Callable[[Probe, int], float]) -> tuple[Outcome, dict[str, Receipt]]:
    """The search where a probe's validation loss at a step, every two steps, is `losses(probe, step)`: judged as the
    command does."""
    jumps: dict[tuple[int, int, int], float | None] = {}

    def fails(probe: Probe) -> float | None:
        key = (probe.start, probe.steps, probe.seed)
        if key not in jumps:
            curve = [
                (step, losses(probe, step)) for step in range(0, search.grid.horizon(probe.start, probe.steps) + 1, 2)
            ]
            ends = (end for end in range(1, len(curve) + 1) if fluctuation(curve[:end])[0] > search.threshold)
            jumps[key] = next((curve[end - 1][0] for end in ends), None)
        return jumps[key]

    return answered(search, fails)


def test_curves_that_jump_while_the_learning_rate_climbs_raise_the_start() -> None:
    def losses(probe: Probe, step: int) -> float:
        home = probe.steps == 80
        jump = 2 * WINDOW + 4 if probe.start >= 24 and probe.steps > 160 else 2 * WINDOW if home else WINDOW - 4
        return 9.0 if step == jump and (probe.start < 24 or probe.steps > 160) else 9 - 0.05 * step

    outcome, _ = curved(SLW, losses)
    longest = max(steps for steps in SLW.grid.durations(24) if steps <= 160)
    assert (outcome.start, outcome.steps, outcome.verified) == (24, longest, True)
    assert f"Starts below it: 8 unstable at step {WINDOW - 4}" in outcome.statement
    assert "unstable at step 44" in outcome.statement


def test_curves_out_of_order_are_said_to_be_stable_again() -> None:
    durations = SLW.grid.durations(8)
    last = durations[-1]

    def losses(probe: Probe, step: int) -> float:
        swings = 80 < probe.steps < last
        return 6 - 0.01 * step + (0.5 * math.sin(step / 3) if swings and step > WINDOW else 0)

    outcome, _ = curved(SLW, losses)
    assert (outcome.start, outcome.steps) == (8, 80)
    assert f"not in order: stable again at {last:,} steps" in outcome.statement


def test_a_budget_returns_the_best_that_was_verified() -> None:
    own = SLW.grid.tokens(8, 80, 3 * WINDOW)
    assert own == SLW.smallest_budget()
    outcome, receipts = answered(options(SLW, budget=own), lambda probe: None)
    assert (outcome.start, outcome.steps, outcome.verified, outcome.complete) == (8, 80, True, False)
    assert "budget ended before 110 steps could be judged" in outcome.statement
    outcome, receipts = answered(options(SLW, budget=own - 1), lambda probe: None)
    assert (outcome.start, outcome.steps, outcome.verified) == (8, 80, False)
    assert "NOT VERIFIED, a rule of thumb" in outcome.statement and "The start was stable" in outcome.statement
    assert [receipt.probe.horizon for receipt in receipts.values()] == [WINDOW]
    outcome, receipts = answered(options(SLW, budget=1), lambda probe: None)
    assert (outcome.start, outcome.steps, outcome.verified, receipts) == (8, 80, False, {})
    assert "The start" not in outcome.statement
    # What is known to be unstable is not offered.
    outcome, _ = answered(options(SLW, budget=own), lambda probe: 3 * WINDOW if probe.steps >= 80 else None)
    assert outcome.steps is not None and outcome.steps < 80 and not outcome.verified
    assert "80 steps: unstable at step 60" in outcome.statement


def test_a_budget_too_small_for_the_longest_says_so() -> None:
    assert LAST.grid.own[1] == LAST.grid.durations(8)[-1]
    outcome, _ = answered(options(LAST, budget=LAST.smallest_budget() - 1), lambda probe: None)
    assert (outcome.start, outcome.steps, outcome.verified, outcome.complete) == (8, 350, False, False)
    near = Search(recipe=recipe(seq_len_warmup=SeqLenWarmup(start=8, steps=240)))
    assert near.grid.durations(8)[-2] == 240
    outcome, _ = answered(options(near, budget=near.smallest_budget()), lambda probe: None)
    assert (outcome.steps, outcome.verified, outcome.complete) == (240, True, False)
    assert "before 340 steps could be judged" in outcome.statement


def test_starts_are_named_with_what_is_known_of_them() -> None:
    outcome, _ = answered(SLW, ordered(SLW, 24, 57))
    assert "Starts below it: 8 unstable at step 20; 16 unstable at step 20." in outcome.statement
    enough = sum(SLW.grid.tokens(start, 80, WINDOW) for start in (8, 16, 32))
    outcome, receipts = answered(options(SLW, budget=enough), ordered(SLW, 24, 57))
    assert [receipt.probe.start for receipt in receipts.values()] == [8, 16, 32]
    assert (outcome.start, outcome.verified, outcome.complete) == (32, False, False)
    assert "24 not judged for want of budget" in outcome.statement
    assert "only the next to be probed" in outcome.statement and "recipe's own" not in outcome.statement, (
        "its start is 8"
    )
    outcome, _ = answered(options(SLW, budget=enough - 1), ordered(SLW, 24, 57))
    assert (outcome.start, outcome.verified) == (32, False)
    assert "Starts below it: 8 unstable at step 20; 16 unstable at step 20." in outcome.statement


def test_more_budget_goes_on_where_less_ended() -> None:
    fails = ordered(SLW, 8, 110)
    _, some = answered(options(SLW, budget=SLW.smallest_budget()), fails)
    again = SLW.next(list(some.values()))
    assert isinstance(again, Probe) and again.name not in some
    enough = SLW.budget_to_go_on(list(some.values()))
    assert options(SLW, budget=enough).next(list(some.values())) == again
    assert isinstance(options(SLW, budget=enough - 1).next(list(some.values())), Outcome)
    whole, _ = answered(SLW, fails)
    assert (whole.start, whole.steps) == (8, 110)


def test_seeds_vote_and_the_share_is_said_with_its_error() -> None:
    search = options(SLW, seeds=(0, 1, 2))
    outcome, receipts = answered(search, lambda probe: 2 * WINDOW if probe.seed == 1 or probe.steps > 80 else None)
    assert (outcome.start, outcome.steps) == (8, 80)
    assert (
        "stable by majority, on 2 of 3 seeds (95 % interval of the share 21% to 94%), unstable first at step 40"
        in outcome.statement
    )
    # Two seeds that agree are enough. The third could be either: Wilson's intervals of 0 and 1 of 3.
    further = [receipt for receipt in receipts.values() if receipt.probe.steps == 110]
    assert [receipt.probe.seed for receipt in further] == [0, 1]
    assert (
        "unstable by majority, stable on 0 of 2 seeds probed, 3 given (95 % interval of the share 0% to 79%)"
        in outcome.statement
    )
    # A tie is not stability.
    tied, _ = answered(options(SLW, seeds=(0, 1)), lambda probe: 2 * WINDOW if probe.seed == 0 else None)
    assert tied.start is None
    # The first failure of two decides: the second would cost and say nothing.
    _, receipts = answered(options(SLW, seeds=(0, 1)), lambda probe: 1 if probe.seed == 0 else None)
    assert {receipt.probe.seed for receipt in receipts.values()} == {0}


@pytest.mark.parametrize("seeds", [3, 5])
def test_the_interval_covers_the_share_though_seeds_end_with_the_majority(seeds: int) -> None:
    """Over every order of verdicts, weighed by its chance: as often as Wilson's interval of all seeds covers, or
    more."""
    search = options(SLW, seeds=tuple(range(seeds)))
    question = Question(8, 80, WINDOW)
    for share in (0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9):
        covered = wilson = 0.0
        for verdicts in itertools.product((True, False), repeat=seeds):
            chance = math.prod(share if stable else 1 - share for stable in verdicts)
            receipts = (seen(8, 80, seed, stable) for seed, stable in enumerate(verdicts))
            known = {receipt.probe.name: receipt for receipt in receipts}
            answer = search._answer(question, known)
            low, high = (float(text.rstrip("%")) / 100 for text in re.findall(r"(\d+%) to (\d+%)", str(answer))[0])
            covered += chance * (low - 0.005 <= share <= high + 0.005)
            fixed = stats.binomtest(sum(verdicts), seeds).proportion_ci(method="wilson")
            wilson += chance * (fixed.low <= share <= fixed.high)
        assert covered >= wilson - 1e-9


def seen(start: int, steps: int, seed: int, stable: bool) -> Receipt:
    """The receipt of a probe seen for the learning-rate warmup."""
    probe = Probe(start=start, steps=steps, seed=seed, horizon=WINDOW)
    return Receipt(
        probe=probe, stable=stable, max_fluctuation=1.0, fluctuation_step=WINDOW, stopped_at_step=WINDOW,
        tokens=SLW.tokens_of(probe), seconds=1.0, curve=(),
    )  # fmt: skip


def test_what_a_lost_checkpoint_makes_train_twice_is_paid_twice() -> None:
    from dataclasses import replace

    survivor = seen(8, 80, 1234, True)
    lost = replace(survivor, lost_tokens=survivor.tokens)
    assert survivor.probe.horizon < SLW.grid.horizon(8, 80), "it may be asked for more"
    rest = SLW.grid.tokens(8, 80, 3 * WINDOW)
    for receipt, needed in ((survivor, rest), (lost, survivor.tokens + rest)):
        probe = options(SLW, budget=needed).next([receipt])
        assert isinstance(probe, Probe) and (probe.steps, probe.horizon) == (80, 3 * WINDOW)
        assert isinstance(options(SLW, budget=needed - 1).next([receipt]), Outcome)
    assert SLW.worst_case([lost]).tokens == SLW.worst_case([survivor]).tokens + survivor.tokens


def test_what_is_left_shrinks_to_nothing() -> None:
    receipts: list[Receipt] = []
    left = [SLW.worst_case(receipts).tokens]
    fails = ordered(SLW, 24, 57)
    while isinstance(probe := SLW.next(receipts), Probe):
        failure = fails(probe)
        unstable = failure is not None and failure <= probe.horizon
        kept = [receipt for receipt in receipts if receipt.probe.name != probe.name]
        made = Receipt(
            probe=probe, stable=not unstable, max_fluctuation=1.0, fluctuation_step=probe.horizon, stopped_at_step=probe.horizon,
            tokens=SLW.tokens_of(probe), seconds=1.0, curve=(),
        )  # fmt: skip
        receipts = [*kept, made]
        left.append(SLW.worst_case(receipts).tokens)
    assert all(after < before for before, after in itertools.pairwise(left))
    assert left[-1] == 0


def test_durations_end_where_the_share_of_the_budget_does() -> None:
    for share in (0.2, 0.66, 1.0):
        grid = options(SLW, max_share=share).grid
        longest = grid.durations(8)[-1]
        assert SeqLenWarmup(start=8, steps=longest).tokens_through(longest, FULL, BATCH) <= share * BUDGET
        longer = round(1.5 * longest)
        assert SeqLenWarmup(start=8, steps=longer).tokens_through(longer, FULL, BATCH) > share * BUDGET


@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_on_the_grid_differ_by_about_the_root_of_two(kind: str) -> None:
    grid = KINDS[kind].grid
    durations = grid.durations(grid.starts[0])
    assert len(durations) >= 6
    # Below ten, whole steps are coarser.
    ratios = [max(pair) / min(pair) for pair in itertools.pairwise(durations) if min(pair) >= 10]
    assert all(1.3 <= ratio <= 1.5 for ratio in ratios), ratios
    assert list(grid.starts) == sorted(set(grid.starts))
    assert durations == tuple(sorted(durations, reverse=kind == "lr"))


def test_probes_differ_from_the_recipe_in_the_setting_and_the_bookkeeping_alone() -> None:
    made = SLW.recipe_of(Probe(start=16, steps=60, seed=5, horizon=60))
    assert made.seq_len_warmup == SeqLenWarmup(start=16, steps=60)
    assert made.optim == SLW.recipe.optim
    assert made.train == SLW.recipe.train
    assert (made.eval.every, made.seed) == (WINDOW // 10, 5)
    assert SLW.grid.recipe_with(16, 60).eval == SLW.recipe.eval
    two = TWO.grid.recipe_with(16, 60).seq_len_warmup
    assert two == SeqLenWarmup(pacing="discrete", lengths=(16, FULL), until=(60,))
    assert LR.grid.recipe_with(0, 60).optim.warmup_steps == 60


def test_a_ramp_is_searched_in_steps_and_set_in_sequences() -> None:
    ramp = RAMP.grid.recipe_with(4, 60).batch_size_warmup
    assert ramp is not None
    assert ramp.start == 4
    assert abs(ramp.steps_of_ramp(BATCH) - 60) <= 3
    assert RAMP.grid.recipe_with(*RAMP.grid.own) == RAMP.recipe


def test_two_stages_are_seen_beyond_the_switch_and_a_learning_rate_beyond_its_peak() -> None:
    assert TWO.grid.horizon(8, 80) == 80 + 2 * WINDOW
    assert TWO.grid.horizon(8, 10) == WINDOW + 2 * WINDOW
    assert LR.grid.horizon(0, WINDOW) == 3 * WINDOW
    assert LR.grid.horizon(0, 57) == 57 + 2 * WINDOW
    # Never beyond the run's end.
    last = TWO.grid.durations(8)[-1]
    short = Search(recipe=recipe(seq_len_warmup=SeqLenWarmup(start=8, steps=80)), multiples=100)
    end = max(plan.step for plan, _ in plan_run(short.recipe))
    assert short.grid.horizon(8, 80) == end
    assert TWO.grid.horizon(8, last) <= max(plan.step for plan, _ in plan_run(TWO.grid.recipe_with(8, last)))


def test_no_stable_setting_is_said() -> None:
    outcome, receipts = answered(SLW, ordered(SLW, math.inf, 0))
    assert (outcome.start, outcome.steps) == (None, None)
    assert "No seq_len_warmup.start that was probed is stable" in outcome.statement
    assert all(f"{receipt.probe.start} unstable at step {WINDOW}" in outcome.statement for receipt in receipts.values())
    assert {receipt.probe.horizon for receipt in receipts.values()} == {WINDOW}
    outcome, _ = answered(SLW, ordered(SLW, 8, 0))
    assert (outcome.start, outcome.steps) == (None, None)
    assert "No duration that was probed from a start of 8 is stable: " in outcome.statement
    assert "Longer starts were not probed with them." in outcome.statement and outcome.tried_start == 8
    outcome, _ = answered(LR, ordered(LR, 0, math.inf))
    assert outcome.start is None and "lengthen" not in outcome.statement


def test_that_all_are_stable_is_said() -> None:
    outcome, _ = answered(SLW, lambda probe: None)
    assert "do not tell durations apart" in outcome.statement
    assert "do not tell" not in answered(SLW, ordered(SLW, 16, 80))[0].statement
    # A minority of the seeds was unstable: that no probe was would be untrue.
    outcome, _ = answered(options(SLW, seeds=(0, 1, 2)), lambda probe: 2 * WINDOW if probe.seed == 1 else None)
    assert (
        "No duration that was probed is unstable by majority, so the probes do not tell durations apart"
        in outcome.statement
    )
    assert "No probe" not in outcome.statement and "no warmup is needed" not in outcome.statement


def test_a_recipe_without_a_warmup_is_searched_from_the_rule_of_thumb() -> None:
    search = Search(recipe=recipe())
    assert search.grid.own == (8, BUDGET // (FULL * BATCH) // 3)
    outcome, _ = answered(search, lambda probe: None if probe.steps <= 104 else 2 * WINDOW)
    assert search.grid.recipe_with(outcome.start, outcome.steps).seq_len_warmup == SeqLenWarmup(start=8, steps=104)  # type: ignore
    assert Search(recipe=load_recipe("gpt2-1.5b")).grid.own[0] == 64
    two = Search(recipe=recipe(), tune="two-stage")
    assert two.grid.recipe_with(*two.grid.own).seq_len_warmup == SeqLenWarmup(
        pacing="discrete", lengths=(8, FULL), until=(104,)
    )


@pytest.mark.parametrize("name", ["gpt2-117m-slw", "gpt2-1.5b-slw", "gpt3-125m-slw"])
def test_where_the_recipe_is_right_its_search_costs_at_most_a_tenth(name: str) -> None:
    search = Search(recipe=load_recipe(name))
    cost = search.own_cost(late=True)
    assert cost.tokens <= search.recipe.train.tokens / 10
    assert cost.receipts[0].probe.steps == search.grid.own[1] and cost.receipts[0].stable
    # Its probe to the horizon alone, by the plan itself.
    horizon = 3 * search.recipe.optim.warmup_steps
    after = next(after for plan, after in plan_run(search.recipe) if plan.step == horizon)
    assert cost.receipts[0].tokens == after.tokens


@pytest.mark.parametrize(
    ("sections", "changed", "said"),
    [
        ({"optim": {"warmup_steps": 0}}, {}, "optim.warmup_steps is 0"),
        ({"optim": {"warmup_steps": 5000}}, {}, "too small to search"),
        ({"simigrad": SimiGrad(target=0.5, min_batch_size=2, max_batch_size=20)}, {}, "simigrad=false"),
        (
            {"seq_len_warmup": SeqLenWarmup(pacing="discrete", lengths=(8, 64), until=(5,))},
            {"tune": "length"},
            "discrete",
        ),
        ({"seq_len_warmup": SeqLenWarmup(pacing="discrete", lengths=(8, 16, 64), until=(5, 9))}, {}, "3 lengths"),
        ({"seq_len_warmup": SeqLenWarmup(steps=9)}, {"tune": "two-stage"}, "no lengths"),
        ({"seq_len_warmup": SeqLenWarmup(steps=9)}, {"tune": "batch"}, r"needs a \[batch_size_warmup\]"),
        (
            {"batch_size_warmup": BatchSizeWarmup(start=2, increment=2, sequences=9)},
            {"tune": "length"},
            "cannot be combined",
        ),
        ({"seq_len_warmup": SeqLenWarmup(start=64, steps=5)}, {}, "no seq_len_warmup.start to search"),
        ({}, {"threshold": 1.0}, "--threshold 1"),
        ({}, {"multiples": 0}, "--multiples 0"),
        ({}, {"max_share": 1.5}, "--max-share 1.5"),
        ({}, {"calm": 1.0}, "--calm 1"),
    ],
)
def test_what_cannot_be_searched_is_refused(sections: dict, changed: dict, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Search(recipe=recipe(**sections), **changed)
