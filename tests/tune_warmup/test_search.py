"""Searches over probes whose answers are made by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from efftrain_cli.tune_warmup.search import (
    BudgetError,
    Candidates,
    Probe,
    Receipt,
    Verdict,
    find_best,
    search,
)

CONTROL = ("warmup=false",)
CLIMB, HORIZON = 10, 30
STARTS = [("start=8",), ("start=16",), ("start=32",)]
DURATIONS = [(f"steps={steps}",) for steps in (160, 113, 80, 57, 40, 28, 20)]
TOKENS = {"steps=160": 10, "steps=113": 14, "warmup=false": 100}
"""Tokens of a step, where it matters; 20 else."""
Fails = Callable[[str, int], float]
"""(setting, seed) -> step at which a probe is unstable; infinite if it never is."""


def candidates(seeds: tuple[int, ...] = (1,), starts: list[tuple[str]] | None = None) -> Candidates:
    return Candidates(
        starts=STARTS if starts is None else starts,
        durations=DURATIONS,
        first=2,
        control=CONTROL,
        climb=CLIMB,
        horizons=[HORIZON] * len(DURATIONS),
        seeds=seeds,
    )


class Answers:
    """Probes that answer as a function of their setting."""

    def __init__(self, fails: Fails, loss: Fails = lambda setting, seed: 4.0) -> None:
        self.fails = fails
        self.loss = loss
        self.asked: list[str] = []
        self.budget = math.inf
        self.receipts: dict[tuple[str, int], Receipt] = {}

    def __call__(self, probe: Probe) -> Receipt:
        setting = " ".join(probe.setting)
        at = self.fails(setting, probe.seed)
        steps = int(min(at, probe.horizon))
        tokens = steps * TOKENS.get(probe.setting[-1], 20)
        if tokens > self.budget:
            raise BudgetError(tokens)
        self.asked.append(f"{setting} {probe.seed} {probe.horizon}")
        receipt = Receipt(
            fluctuation=2.0 if at <= probe.horizon else 1.0,
            unstable_at=int(at) if at <= probe.horizon else None,
            steps=steps,
            stuck_above=5.0,
            curve=((0, 6.0), (tokens, self.loss(setting, probe.seed))),
        )
        self.receipts[setting, probe.seed] = receipt
        return receipt


def unstable_from(longest_stable: int, shortest_start: int = 8) -> Fails:
    """Without a warmup at step 12; longer warmups at 20, shorter starts at 5."""

    def fails(setting: str, seed: int) -> float:
        if setting == "warmup=false":
            return 12
        words = dict(word.split("=") for word in setting.split())
        if int(words["start"]) < shortest_start:
            return 5
        return 20 if int(words["steps"]) > longest_stable else math.inf

    return fails


def found(answers: Answers, seeds: tuple[int, ...] = (1,)) -> tuple[str | None, list[Verdict]]:
    chosen = candidates(seeds)
    verdicts = list(search(chosen, answers))
    best = find_best(chosen, verdicts)
    return None if best is None else " ".join(best.setting), verdicts


@pytest.mark.parametrize("longest", [160, 113, 80, 57, 40, 28, 20])
@pytest.mark.parametrize("start", [8, 16, 32])
def test_the_shortest_start_and_the_longest_duration_are_found(longest, start):
    """Wherever the boundary lies. A start is judged while the learning rate warms up only."""
    best, _ = found(Answers(unstable_from(longest, start)))
    assert best == f"start={start} steps={longest}"


def test_a_setting_is_stable_if_it_is_on_all_of_its_seeds():
    """(a): 80 steps fail on the third seed only, 57 on none; a setting's other seeds are not
    probed once one has failed."""

    def fails(setting: str, seed: int) -> float:
        if setting.endswith("steps=80"):
            return 25 if seed == 3 else math.inf
        return unstable_from(57)(setting, seed)

    answers = Answers(fails)
    best, verdicts = found(answers, seeds=(1, 2, 3))
    assert best == "start=8 steps=57"
    by_setting = {verdict.setting[-1]: verdict.words for verdict in verdicts}
    assert by_setting["steps=80"] == ("stable", "stable", "unstable")
    assert found(Answers(fails), seeds=(1, 2))[0] == "start=8 steps=80"


def test_a_probe_on_the_unigram_plateau_is_stuck_and_not_stable():
    """(b): 80 steps end at 5.1, above 5.0; while the learning rate warms up that is allowed."""

    def loss(setting: str, seed: int) -> float:
        return 5.1 if setting.endswith("steps=80") else 4.0

    answers = Answers(unstable_from(80), loss)
    best, verdicts = found(answers)
    assert best == "start=8 steps=57"
    words = [verdict.words for verdict in verdicts if verdict.setting[-1] == "steps=80"]
    assert words == [("stable",), ("stuck",)]


def test_a_loss_worse_than_the_control_s_at_equal_tokens_is_not_recommended():
    """(c): the control falls on a line from 6.0 to 5.4 at 1,200 tokens, so it has 5.7 at 600."""

    def verdict(setting: tuple[str, ...], tokens: int, *losses: float) -> Verdict:
        word = "unstable" if setting == CONTROL else "stable"
        receipts = [Receipt(1.0, None, 30, 9.0, ((0, 6.0), (tokens, loss))) for loss in losses]
        return Verdict(setting, HORIZON, (word,) * len(losses), tuple(receipts))

    def best(*of_setting: float) -> Verdict | None:
        probed = verdict(("start=8", "steps=80"), *of_setting)
        return find_best(candidates(), [verdict(CONTROL, 1200, 5.4, 5.4), probed])

    assert best(600, 5.95, 5.75) is None, "by .25 and .05: .15 > .1"
    assert best(600, 5.9, 5.6) is not None, "by .2 and -.1: .05 < .15"
    assert best(600, 6.0) is not None, "one seed has no standard error"
    assert best(1200, 9.0, 9.0) is None
    assert best(1201, 9.0, 9.0) is not None, "the control ended before"
    lost = Receipt(math.inf, 30, 30, 9.0, ((0, 6.0), (600, 5.0), (600, math.inf)))
    assert [lost.loss_at(tokens) for tokens in (300, 600, 601)] == [5.5, 5.0, None]


def test_a_stable_control_ends_the_search_and_nothing_is_recommended():
    """(d): probed first, on every seed."""
    answers = Answers(lambda setting, seed: math.inf)
    best, verdicts = found(answers, seeds=(1, 2))
    assert best is None and len(verdicts) == 1
    assert answers.asked == ["warmup=false 1 30", "warmup=false 2 30"]


def test_a_budget_that_ends_says_what_the_next_probe_needs():
    answers = Answers(unstable_from(160))
    answers.budget = 400
    with pytest.raises(BudgetError) as error:
        found(answers)
    assert error.value.needed == 12 * 100
    answers.budget = 1200
    assert found(answers)[0] == "start=8 steps=160"


def test_a_probe_that_ended_before_its_horizon_is_not_stable():
    """A weight that is not finite leaves no row."""
    receipt = Receipt(1.0, None, 7, 5.0, ((0, 6.0), (70, 4.0)))
    assert receipt.judge(10, may_be_stuck=True) is None
    assert receipt.judge(7, may_be_stuck=True) == "stable"
    (verdict, *_) = search(candidates(), lambda probe: receipt)
    assert verdict.words == ("unstable",)
