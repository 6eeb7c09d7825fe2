"""Verdicts from made runs: directions, looks, Holm, failed and pending runs; and that studies
without a difference err rarely."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from efftrain_cli.compare.engine import Looks, chance_of_claim
from efftrain_cli.compare.verdicts import note_of, sentence
from efftrain_cli.foundation.why import Why
from efftrain_cli.study.file import Arm, Primary, Study, StudyFile
from efftrain_cli.study.judge import JudgedRun, StudyState, Verdict
from efftrain_cli.study.judge import judge as judge_study
from efftrain_cli.study.records import Plan
from efftrain_cli.study.text import looks_line, verdict_lines


@dataclass
class FakeRun:
    """What `judge` reads of a run."""

    loss: float
    status: str = "finished"
    seed: int = 0
    evaluated: dict[str, np.ndarray] = field(default_factory=dict)
    recipe: dict[str, object] = field(default_factory=lambda: {"optim.schedule": "constant"})
    name: str = "run"
    step: int = 100
    tokens: float = 1000.0
    peak_lr: float = 1e-3
    warmup_tokens: float = 100.0

    def __post_init__(self) -> None:
        self.evaluated = self.evaluated or {
            "step": np.array([0, 100]),
            "tokens": np.array([0, 1000]),
            "flops": np.array([0, 6e8]),
            "seconds": np.array([0, 5]),
            "val_loss": np.array([7.0, self.loss]),
        }

    @property
    def failed(self) -> bool:
        return self.status == "diverged"

    @property
    def pending(self) -> bool:
        return self.status not in ("finished", "diverged")

    @property
    def final_loss(self) -> float | None:
        return float(self.evaluated["val_loss"][-1]) if self.status == "finished" else None


Made = dict[str, dict[int, FakeRun]]
"""Runs by arm and seed."""


def study(
    direction: str = "different",
    margin: float | None = None,
    seeds: str = "0..4",
    looks: int = 1,
    arms: tuple[str, ...] = ("base", "method"),
) -> StudyFile:
    primary = Primary(measure="final_loss", direction=direction, margin=margin)
    made = tuple(Arm(name=name, recipe="small") for name in arms)
    return StudyFile(
        Path("made.toml"),
        Study(seeds=seeds, looks=looks, baseline="base", primary=(primary,), arms=made),
    )


def runs(**losses: list[float | None]) -> Made:
    """Arm -> losses by seed; None: diverged."""
    return {
        arm: {
            seed: FakeRun(9.0, "diverged", seed) if loss is None else FakeRun(loss, seed=seed)
            for seed, loss in enumerate(values)
        }
        for arm, values in losses.items()
    }


def judge(
    file: StudyFile, made: Made, *why: Why, rated: dict[float, Made] | None = None, **more: object
) -> StudyState:
    """Judge runs with the arms' own learning rate, and others by theirs."""
    flat = []
    for rate, arms in {None: made, **(rated or {})}.items():
        for arm, side in arms.items():
            flat += [JudgedRun(arm, rate, run) for run in side.values()]
    return judge_study(file, flat, *why, **more)


def judged(file: StudyFile, made: Made, *why: Why, **more: object) -> Verdict:
    """Return the only verdict."""
    (verdict,) = judge(file, made, *why, **more).verdicts
    return verdict


BASE = [3.50, 3.52, 3.47, 3.55, 3.49]


def shifted(by: float, noise: float = 0.004) -> list[float]:
    return [loss + by + noise * sign for loss, sign in zip(BASE, (1, -1, 2, -2, 0), strict=True)]


@pytest.mark.parametrize(
    ("direction", "margin", "shift", "outcome", "opposite"),
    [
        ("different", None, -0.05, "better", False),
        ("different", None, 0.05, "worse", False),
        ("different", None, 0.001, "undecided", False),
        ("better", None, -0.05, "better", False),
        ("better", None, 0.05, "undecided", True),
        ("noninferior", 0.02, 0.0, "noninferior", False),
        ("noninferior", 0.02, -0.5, "noninferior", False),
        ("noninferior", 0.02, 0.016, "undecided", False),
        ("noninferior", 0.02, 0.05, "undecided", True),
        ("equivalent", 0.02, 0.002, "equivalent", False),
        ("equivalent", 0.02, -0.05, "undecided", True),
    ],
)
def test_directions(direction, margin, shift, outcome, opposite):
    found = judge(study(direction, margin), runs(base=BASE, method=shifted(shift)))
    (verdict,) = found.verdicts
    assert (verdict.outcome, verdict.opposite) == (outcome, opposite)
    assert verdict.estimate.mean == pytest.approx(shift) and found.complete
    assert (verdict.p_holm <= 0.05) == (outcome != "undecided")


def test_the_smallest_effect_that_could_be_seen():
    verdict = judged(study(), runs(base=BASE, method=shifted(0.001)))
    # sd of 1, -1, 2, -2, 0 is sqrt(2.5): of five pairs a t test shows 1.6822 sd with power 0.8
    # (tables of Student's t)
    assert verdict.min_detectable_effect == pytest.approx(0.004 * 2.5**0.5 * 1.6822, rel=0.01)


def test_holm_over_primaries_and_arms():
    several = study(arms=("base", "a", "b", "c"))
    found = judge(several, runs(base=BASE, a=shifted(-0.05), b=shifted(0.0085), c=shifted(0.0002)))
    p = [verdict.p for verdict in found.verdicts]
    assert p[1] < 0.05
    assert [verdict.p_holm for verdict in found.verdicts] == pytest.approx(
        [3 * p[0], 2 * p[1], p[2]]
    )
    assert [verdict.outcome for verdict in found.verdicts] == [
        "better",
        "worse" if 2 * p[1] <= 0.05 else "undecided",
        "undecided",
    ]


def test_a_pending_run_lets_the_look_wait():
    there = runs(base=BASE, method=shifted(-0.05)[:4])
    found = judge(study(), there)
    assert (
        found.look == 0
        and found.verdicts == ()
        and found.pending == ("method seed 4",)
        and not found.complete
    )
    there["method"][4] = FakeRun(3.0, "running", 4)
    assert judge(study(), there).pending == ("method seed 4",)


def test_a_study_ends_at_the_first_look_that_decides_all():
    looks = study(looks=2)
    early = judge(looks, runs(base=BASE[:3], method=shifted(-0.5)[:3]))
    assert early.look == 1 and early.decided and early.complete
    # what came later is not looked at any more
    assert judge(looks, runs(base=BASE, method=[*shifted(-0.5)[:3], 9.0, 9.0])) == early
    late = judge(looks, runs(base=BASE[:3], method=shifted(-0.006)[:3]))
    assert late.look == 1 and not late.complete and late.pending[0] == "base seed 3"


def test_the_chance_of_a_later_claim_is_shown_where_a_look_is_left():
    two = study(seeds="0..4", looks=2)
    first = judge(two, runs(base=BASE[:3], method=[3.46, 3.515, 3.455]))
    (verdict,) = first.verdicts
    looks = Looks(two.looks, 1, registered=True)
    assert verdict.outcome == "undecided" and first.look == 1
    chance = chance_of_claim(verdict, looks, 1)
    stricter = chance_of_claim(verdict, looks, 3)
    # At a third of the level no two further pairs could do it: with two of 0.03, the best, t is
    # 3.87 of 4.0.
    assert stricter == 0.0 and chance is not None and 0.05 < chance < 0.95
    assert chance_of_claim(verdict, replace(looks, taken=2), 1) is None
    failed = judged(two, runs(base=BASE[:3], method=[3.46, None, None]))
    assert chance_of_claim(failed, looks, 1) is None


def test_a_look_costs():
    """The same five pairs are decided by one look, and not by the second of two."""
    method = shifted(-0.0082)
    assert judged(study(), runs(base=BASE, method=method)).outcome == "better"
    twice = judged(study(looks=2), runs(base=BASE, method=method))
    assert twice.outcome == "undecided" and twice.p > 0.05
    once = judged(study(), runs(base=BASE, method=method)).estimate
    assert twice.estimate.high - twice.estimate.low > once.high - once.low


def test_failures_decide_where_too_few_pairs_finished():
    base = [*BASE, 3.51, 3.48]
    method = [None, None, None, None, None, None, 3.45]
    verdict = judged(study(seeds="0..6"), runs(base=base, method=method))
    assert verdict.outcome == "worse" and "method 6 of 7 (42 to 100 %)" in note_of(verdict)
    verdict = judged(study("better", seeds="0..6"), runs(base=method, method=base))
    assert verdict.outcome == "better"
    verdict = judged(study("noninferior", 0.1, seeds="0..6"), runs(base=base, method=method))
    assert verdict.outcome == "undecided" and "a margin cannot be tested then" in note_of(verdict)
    verdict = judged(study(seeds="0..2"), runs(base=BASE[:3], method=[None, None, None]))
    assert verdict.outcome == "undecided" and "smallest p with so many runs is 0.1" in note_of(
        verdict
    )


def test_an_exact_test_pays_for_every_look_that_was_planned():
    """All seven diverged at the first of two looks: McNemar's p is 2 of 2^7 signs."""
    found = judge(study(seeds="0..13", looks=2), runs(base=[*BASE, 3.51, 3.5], method=[None] * 7))
    assert (found.look, found.verdicts[0].outcome) == (1, "worse")
    assert found.verdicts[0].p == pytest.approx(2 * 2 / 128)


def test_a_stuck_baseline_run_is_no_difference_of_losses():
    """Two runs of ten end above the median loss at 20 % of the budget: 7 - 0.2 (7 - 3.5) = 6.3
    nats."""
    losses = [3.50, 3.52, 3.47, 3.55, 3.49, 3.51, 3.48, 3.53, 3.5, 3.5]
    method = [loss + 0.001 * (-1) ** i for i, loss in enumerate(losses)]
    stuck = [*losses[:8], 6.5, 6.6]
    verdict = judged(study(seeds="0..9"), runs(base=stuck, method=method))
    assert (verdict.outcome, verdict.estimate.n) == ("undecided", 8)
    assert verdict.estimate.mean == pytest.approx(0.0)
    assert "base 2 of 10 (3 to 56 %), method 0 of 10 (0 to 31 %)" in note_of(verdict)
    assert "the losses are those of the other runs" in note_of(verdict)


@pytest.mark.parametrize(
    ("shift", "failing", "outcome", "word"),
    [
        (-0.05, "base", "better", ""),
        (-0.05, "method", "undecided", "lower loss, more failures; "),
        (0.05, "method", "worse", ""),
        (0.05, "base", "undecided", "higher loss, fewer failures; "),
    ],
)
def test_only_a_side_that_fails_no_more_is_claimed(shift, failing, outcome, word):
    there = runs(base=BASE, method=shifted(shift))
    there[failing][4].status = "diverged"
    verdict = judged(study(), there)
    assert (verdict.outcome, verdict.estimate.n) == (outcome, 4)
    assert note_of(verdict).startswith(word + "failed or got stuck: ")


def test_nothing_changes_without_failures():
    """Final losses at the stuck level itself are not above it."""
    verdict = judged(study(), runs(base=[7.0] * 5, method=[6.9, 6.8, 6.7, 6.9, 6.8]))
    assert (verdict.outcome, verdict.note, verdict.estimate.n) == ("better", "", 5)


def test_equal_runs_are_no_claim():
    verdict = judged(study(), runs(base=BASE, method=BASE))
    assert verdict.outcome == "undecided" and "no spread" in note_of(verdict)


class Curve(FakeRun):
    """A run whose loss falls as 7 - `speed` log(1 + tokens / 1000) over ten evaluations to 100,000
    tokens."""

    def __init__(self, speed: float, status: str = "finished", seed: int = 0) -> None:
        tokens = np.linspace(0, 100_000, 11)
        super().__init__(0.0, status, seed)
        loss = 7 - speed * np.log1p(tokens / 1000)
        self.evaluated = {
            "step": tokens / 1000,
            "tokens": tokens,
            "val_loss": loss,
        }
        self.name = f"run at {speed}"
        self.recipe = {"train.tokens": 100_000}


def cost_study(
    direction: str = "better", measure: str = "tokens_to_target", **more: float
) -> StudyFile:
    file = study(direction, seeds="0..6")
    primary = Primary(measure=measure, direction=direction, **more)
    return StudyFile(
        file.path, Study(seeds="0..6", baseline="base", primary=(primary,), arms=file.study.arms)
    )


def curves(**speeds: list[float]) -> Made:
    return {
        arm: {seed: Curve(speed, seed=seed) for seed, speed in enumerate(values)}
        for arm, values in speeds.items()
    }


SPEEDS = [0.80, 0.81, 0.79, 0.80, 0.82, 0.78, 0.80]


def test_cost_to_a_fixed_target_is_a_ratio():
    there = curves(base=SPEEDS, method=[speed * 1.1 + 0.001 * i for i, speed in enumerate(SPEEDS)])
    verdict = judged(cost_study(target=4.0), there)
    # 3 = 0.8 log(1 + x) needs x = 41.5; 3 = 0.88 log(1 + x) needs 29.2; the straight lines between
    # evaluations bend that a little
    assert verdict.outcome == "better" and verdict.estimate.log
    assert verdict.estimate.mean == pytest.approx(41.5 / 29.2, rel=0.05)


def test_cost_without_a_target_is_to_the_worse_one_s_final_loss():
    faster = [speed * 1.05 + 0.001 * i for i, speed in enumerate(SPEEDS)]
    better = judged(cost_study("different"), curves(base=SPEEDS, method=faster))
    worse = judged(cost_study("different"), curves(base=faster, method=SPEEDS))
    assert (better.outcome, worse.outcome) == ("better", "worse")
    assert better.estimate.mean == pytest.approx(1 / worse.estimate.mean)
    same = judged(cost_study("noninferior", margin=0.05), curves(base=SPEEDS, method=faster))
    assert same.outcome == "noninferior"


def test_cost_without_a_target_is_judged_at_one_budget_by_the_pairs_that_finished():
    there = curves(base=SPEEDS, method=[speed * 1.1 + 0.001 * i for i, speed in enumerate(SPEEDS)])
    assert judged(cost_study(), there).outcome == "better"
    there["method"][3].recipe = {"train.tokens": 200_000}
    verdict = judged(cost_study(), there)
    assert verdict.outcome == "undecided" and "schedules of 100K and 200K tokens" in note_of(
        verdict
    )
    there["method"][3] = Curve(0.9, "diverged", 3)
    verdict = judged(cost_study(), there)
    assert verdict.estimate.n == len(SPEEDS) - 1
    assert note_of(verdict).startswith("lower loss, more failures")


@pytest.mark.parametrize(
    ("changes", "shape"),
    [
        ({"optim.schedule": "wsd", "optim.decay_share": 0.1}, "wsd over the last 10 %"),
        ({"optim.lr": 1e-3, "optim.min_lr": 9e-4}, "cosine to 90 % of its peak"),
    ],
)
def test_costs_between_schedule_shapes_are_not_judged(changes, shape):
    for target in (None, 4.0):
        there = curves(base=SPEEDS, method=[speed * 1.1 for speed in SPEEDS])
        for run in there["method"].values():
            run.recipe = run.recipe | changes
        verdict = judged(cost_study(target=target), there)
        shapes = f"the learning rate decays otherwise (cosine and {shape})"
        assert verdict.outcome == "undecided" and shapes in note_of(verdict)


def test_looks_that_contradict_each_other_decide_nothing():
    planned = study(looks=2, arms=("base", "a", "b"))
    early = [
        -0.1,
        -0.1001,
        -0.0999,
    ]  # a is clearly better at the first look; b lets the study go on
    a, turned = (
        [loss + by for loss, by in zip(BASE, [*early, *later], strict=True)]
        for later in ((-0.1, -0.3), (0.5, 0.5))
    )
    verdict = judge(planned, runs(base=BASE, a=a, b=shifted(0.0002))).verdicts[0]
    assert (verdict.outcome, len(verdict.seeds)) == ("better", 5)
    verdict = judge(planned, runs(base=BASE, a=turned, b=shifted(0.0002))).verdicts[0]
    assert verdict.outcome == "undecided" and verdict.estimate.mean == pytest.approx(
        (0.5 * 2 - 0.3) / 5
    )
    assert note_of(verdict) == "an earlier look said better, the last one points the other way"


def test_rank_verdicts_say_how_they_were_reached():
    base, method = [*BASE, 3.51, 3.48], [None, None, None, None, None, None, 3.45]
    shares = "failed or got stuck: base 0 of 7 (0 to 41 %), method 6 of 7 (42 to 100 %)"
    file = study(seeds="0..6")
    verdict = judged(file, runs(base=base, method=method))
    # Six seeds of which only the method's failed: 2 of 2^6 signs.
    assert (
        sentence(verdict, "method", "base")
        == f"method is worse than base in final loss: p = 0.031; {shares}; McNemar's exact test."
    )
    file = study("better", seeds="0..6")
    verdict = judged(file, runs(base=base, method=method))
    assert (
        sentence(verdict, "method", "base")
        == "method against base: better is not shown; the test says worse in final loss: p = 1; "
        f"{shares}; McNemar's exact test."
    )
    # 3 looks are paid for: 3 p is above the stricter alpha, p alone is not
    p = judged(study(seeds="0..6"), runs(base=base, method=method)).p
    for looks, opposite in ((1, True), (3, False)):
        strict = StudyFile(file.path, replace(file.study, alpha=2 * p, looks=looks))
        assert judged(strict, runs(base=base, method=method)).opposite == opposite


def test_the_margin_that_equivalence_shows_in_80_percent():
    verdict = judged(study("equivalent", 0.02), runs(base=BASE, method=shifted(0.001)))
    random, se = np.random.default_rng(5), 0.004 * 2.5**0.5
    drawn = random.normal(0, se, (20_000, 5))
    half = 2.1318 * drawn.std(1, ddof=1) / 5**0.5  # Student's t at 95 %, 4 degrees of freedom
    shown = (np.abs(drawn.mean(1)) + half < verdict.min_detectable_effect).mean()
    assert shown == pytest.approx(0.8, abs=0.02)


def test_levels_are_those_of_the_direction():
    two, one = looks_line(study(looks=2)), looks_line(study("better", looks=2))
    assert "two-sided levels" in two and "one-sided" not in two
    assert "one-sided levels" in one and "two-sided" not in one
    # a t test's last level can be no more than alpha, and of two looks it is not far below
    last = float(one.split("levels ")[1].split(", ")[1])
    assert 0.035 < last < 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("direction", "margin", "shift"), [("different", None, 0.0), ("noninferior", 0.02, 0.02)]
)
def test_two_arms_and_three_looks_err_in_at_most_5_percent(direction, margin, shift):
    """Both claims that could be made are wrong; the chance of making one or more is the study's
    alpha."""
    planned = study(direction, margin, "0..8", 3, ("base", "a", "b"))
    random = np.random.default_rng(3)
    claims = 0
    for _ in range(1500):
        shared = random.normal(3.5, 0.05, 9)
        losses = {
            arm: list(shared + random.normal(0, 0.01, 9) + (shift if arm != "base" else 0))
            for arm in ("base", "a", "b")
        }
        found = judge(planned, runs(**losses))
        claims += any(verdict.outcome != "undecided" for verdict in found.verdicts)
    assert claims / 1500 <= 0.065  # 2.7 standard errors above 5 %


# --- learning-rate sensitivity --------------------------------------------------------------------


RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3)


def over_rates(**losses: list[list[float | None]]) -> dict[float, dict[str, dict[int, FakeRun]]]:
    """Arm -> losses by rate (the first of RATES), then by seed."""
    found: dict[float, dict[str, dict[int, FakeRun]]] = {}
    for arm, rows in losses.items():
        for rate, row in zip(RATES, rows, strict=False):
            found.setdefault(rate, {}).update(runs(**{arm: row}))
    for rate, by_arm in found.items():
        for run in (run for by_seed in by_arm.values() for run in by_seed.values()):
            run.recipe = {"optim.schedule": "constant", "optim.lr": rate}
    return found


def above(*rises: float, noise: float = 0.0) -> list[list[float | None]]:
    """Losses of the seeds at each rate, `rises` above BASE; with noise at the last."""
    rows = [[loss + rise for loss in BASE] for rise in rises[:-1]]
    return [*rows, shifted(rises[-1], noise)]


def sensitivity_study(direction: str = "better", margin: float | None = None) -> StudyFile:
    made = study(direction, margin)
    primary = Primary(measure="lr_sensitivity", direction=direction, margin=margin, rates=RATES[:5])
    return StudyFile(made.path, replace(made.study, primary=(primary,)))


def test_the_less_sensitive_arm_is_better_although_its_best_loss_is_not():
    base, method = above(0.6, 0.3, 0.0, 0.3, 0.9), above(0.3, 0.2, 0.1, 0.2, 0.5, noise=0.006)
    verdict = judged(sensitivity_study(), {}, rated=over_rates(base=base, method=method))
    # 2.1 / 5 = 0.42 against 1.3 / 5 - 0.1 = 0.16
    assert verdict.outcome == "better" and verdict.estimate.mean == pytest.approx(-0.26, abs=1e-9)
    assert sentence(verdict, "method", "base").startswith(
        "method is better than base in learning-rate sensitivity: -0.2600 ["
    )
    assert (
        note_of(verdict)
        == "mean over each arm's best rate and 2 on either side; other steps or widths give other"
        " values; optima half a step apart alone differ in up to 97 % of simulated studies if"
        " the loss is twice as steep on one side; best losses: base 3.506 at 0.002 and method"
        " 3.606 at 0.002"
    )


def test_a_diverged_rate_counts_with_the_loss_before_training():
    base = above(0.2, 0.1, 0.0, 0.1, 0.2)
    method = [*base[:4], [None] * 5]  # loss before training: 7.0
    verdict = judged(sensitivity_study("different"), {}, rated=over_rates(base=base, method=method))
    # the mean of BASE is 3.506
    expected = (7.0 - 3.506 - 0.2) / 5
    assert verdict.outcome == "worse" and verdict.estimate.mean == pytest.approx(expected)
    assert note_of(verdict).endswith("; 5 of its 25 runs diverged")


def test_where_the_best_rate_lies_in_the_grid_changes_no_sensitivity():
    """Around 4e-3 and 8e-3 the curves are the same; over all seven rates the means are 0.4 and
    0.6."""
    base = above(0.9, 0.4, 0.1, 0.0, 0.1, 0.4, 0.9)
    method = above(1.6, 0.9, 0.4, 0.1, 0.0, 0.1, 0.4, noise=0.004)
    verdict = judged(sensitivity_study("different"), {}, rated=over_rates(base=base, method=method))
    assert verdict.outcome == "undecided" and verdict.estimate.mean == pytest.approx(0.0, abs=1e-9)
    assert "2 on either side" in note_of(verdict)


def test_noise_at_the_best_rate_is_not_sensitivity():
    """Of each seed the rate that is best for all counts, not the seed's own luckiest."""
    base = above(0.2, 0.1, 0.0, 0.1, 0.2)
    method = [*base[:1], shifted(0.1, 0.06), *base[2:]]  # 0.1 - 2 * 0.06 < 0 with the fourth seed
    verdict = judged(sensitivity_study("different"), {}, rated=over_rates(base=base, method=method))
    # The noise adds up to 0 over the seeds.
    assert verdict.outcome == "undecided" and verdict.estimate.mean == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("base", "method", "reason"),
    [
        (
            above(0.3, 0.0, 0.1, 0.4, 0.9),
            above(0.6, 0.3, 0.0, 0.3, 0.6),
            (
                "the best rate needs 2 rates on either side (base 0.001, method 0.002); rates to"
                " add: 0.00025"
            ),
        ),
        (
            above(0.0, 0.1, 0.2, 0.4, 0.9),
            above(0.9, 0.6, 0.3, 0.1, 0.0),
            (
                "the best rate needs 2 rates on either side (base 0.0005, method 0.008); rates to"
                " add: 0.000125, 0.00025, 0.016, 0.032"
            ),
        ),
        (
            above(0.6, 0.3, 0.0, 0.3, 0.6),
            [[None, *BASE[1:]]] * 5,
            "method: there is no learning rate at which every seed finished: try lower ones",
        ),
    ],
    ids=["one below", "at the edges", "trained at no rate"],
)
def test_sensitivity_is_withheld_if_the_grid_ends_near_a_best_rate(base, method, reason):
    rated = over_rates(base=base, method=method)
    verdict = judged(sensitivity_study("different"), {}, rated=rated)
    assert verdict.outcome == "undecided" and verdict.p == 1.0
    assert verdict.why == Why("not_judged", f"not judged: {reason}")


def test_a_missing_rate_keeps_the_look_waiting():
    rows = [list(BASE)] * 5
    rated = over_rates(base=rows, method=rows)
    del rated[4e-3]["method"][3]
    found = judge(sensitivity_study(), {}, rated=rated)
    assert found.look == 0 and found.pending == ("method seed 3",)


def test_other_budgets_are_judged_as_they_were_registered():
    """A study without `equal` was registered before there was such a key."""
    there = runs(base=BASE, method=shifted(-0.05))
    for run in there["method"].values():
        run.evaluated["tokens"] = np.array([0, 2000])
    verdict = judged(study(), there)
    assert (verdict.outcome, note_of(verdict)) == ("better", "method spent 2.00x the tokens")


@pytest.mark.parametrize(
    ("direction", "margin", "later", "word"),
    [
        ("better", None, 0.5, "better"),
        ("noninferior", 0.02, 0.5, "noninferior"),
        ("equivalent", 0.02, 0.5, "equivalent"),
        ("equivalent", 0.02, -0.5, "equivalent"),
    ],
)
def test_no_direction_contradicts_its_last_look(direction, margin, later, word):
    """a passes at the first look of three seeds; the last two seeds carry the mean of all beyond
    the claim."""
    first = -0.1 if direction == "better" else 0.0
    by = [first, first - 0.0001, first + 0.0001, later, later]
    a = [loss + each for loss, each in zip(BASE, by, strict=True)]
    planned = study(direction, margin, looks=2, arms=("base", "a", "b"))
    there = runs(base=BASE, a=a, b=shifted(0.3, 0.3))
    early = judge(planned, {arm: {s: side[s] for s in range(3)} for arm, side in there.items()})
    assert early.verdicts[0].outcome == word
    verdict = judge(planned, there).verdicts[0]
    assert verdict.outcome == "undecided"
    assert note_of(verdict) == f"an earlier look said {word}, the last one points the other way"


def test_the_opposite_is_corrected_for_all_arms():
    """Among ten arms nothing is said to be worse where the interval of a single one says it."""
    worse = shifted(
        0.0095
    )  # 3.4 standard errors: beyond t of 4 degrees at 5 % (2.8), not at 0.5 % (5.6)
    alone = judged(study("better"), runs(base=BASE, method=worse))
    arms = tuple(f"a{i}" for i in range(10))
    many = judge(
        study("better", arms=("base", *arms)), runs(base=BASE, **dict.fromkeys(arms, worse))
    )
    assert alone.opposite and not any(verdict.opposite for verdict in many.verdicts)


def test_a_look_that_is_not_the_last_prints_the_chance_of_a_claim():
    file = study(looks=2)
    state = judge(file, runs(base=BASE[:3], method=shifted(0.004)[:3]))
    (verdict,) = state.verdicts
    chance = chance_of_claim(verdict, Looks((3, 5), 1, 0.05, registered=True), 1)
    assert verdict.outcome == "undecided" and chance is not None and 0.05 < chance < 0.95
    plan = Plan.model_construct(registered="now", sha256="0" * 64, exploratory=[])
    lines = verdict_lines(state, plan)
    words = "chance to show it by the last look, if the difference stays as estimated: method"
    assert f"{words} {100 * chance:.0f} % in final loss (shown, decides nothing)" in lines
    last = judge(file, runs(base=BASE, method=shifted(0.001)))
    assert not [line for line in verdict_lines(last, plan) if line.startswith("chance")]
