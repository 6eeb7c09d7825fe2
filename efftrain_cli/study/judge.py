"""The verdicts of a study, from its runs: every primary measure of every arm against the baseline, at the looks so far.

Values, never a terminal: `screen.py` shows them. A diverged run is the worst result there is; a run that has not ended
is pending, and the look that needs it waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from efftrain_cli.compare.comparison import at_common_evaluations
from efftrain_cli.compare.engine import Looks, Verdict, correct, verdict
from efftrain_cli.compare.groups import Group
from efftrain_cli.compare.measures import Question, cost_question, final_loss
from efftrain_cli.compare.reading import RunNumbers
from efftrain_cli.compare.sensitivity import sensitivity
from efftrain_cli.foundation.why import Why
from efftrain_cli.study.file import COSTS, Primary, StudyFile
from efftrain_cli.study.phases import Tuned
from efftrain_cli.trials.trial import ENDED

Runs = Mapping[int, RunNumbers]
"""Seed -> run, of one arm."""


@dataclass(frozen=True)
class StudyState:
    """A study at its last complete look."""

    look: int
    """Looks taken; 0 before the first."""
    looks: tuple[int, ...]
    """Numbers of seeds at each planned look."""
    levels: tuple[float, ...]
    """Two-sided nominal level of each look's own t test, at the study's alpha."""
    verdicts: tuple[Verdict, ...]
    pending: tuple[str, ...]
    """Runs that the next look waits for."""
    labels: tuple[Why, ...] = ()
    """What a reader of the runs must know; "allowed" makes the study exploratory."""
    tuned: tuple[Tuned, ...] = ()
    """What each arm was trained with; empty until tuning has ended."""

    @property
    def decided(self) -> bool:
        """Every primary of every arm has been shown; further seeds would change nothing."""
        return bool(self.verdicts) and all(
            verdict.outcome != "undecided" for verdict in self.verdicts
        )

    @property
    def complete(self) -> bool:
        """No look is left, or none is needed."""
        return self.decided or self.look == len(self.looks)


def judge(
    file: StudyFile,
    runs: Mapping[str, Runs],
    withheld: Why | None = None,
    rated: Mapping[float, Mapping[str, Runs]] | None = None,
) -> StudyState:
    """Judges a study.

    Args:
        runs: arm -> seed -> run, of those runs that exist.
        withheld: why nothing may be judged at all; None where it may.
        rated: learning rate -> the same of the runs that lr_sensitivity is judged by.
    """
    runs, notes = _evaluated_alike(runs)
    rated = rated or {}
    # No confirmation runs exist where the only primary is lr_sensitivity.
    kinds = list(rated.values())
    if any(primary.measure != "lr_sensitivity" for primary in file.study.primary):
        kinds.append(runs)
    ended = {}
    for arm in file.study.arms:
        sides = (
            {seed for seed, run in kind.get(arm.name, {}).items() if run.status in ENDED}
            for kind in kinds
        )
        ended[arm.name] = set.intersection(*sides)
    looks = Looks(file.looks, 0, file.study.alpha, registered=True)
    state = StudyState(0, looks.plan, looks.levels, (), (), notes)
    for number, seeds in enumerate(looks.plan, 1):
        missing = tuple(
            f"{arm.name} seed {seed}"
            for seed in file.seeds[:seeds]
            for arm in file.study.arms
            if seed not in ended[arm.name]
        )
        if missing:
            return replace(state, pending=missing)
        verdicts = _judge_look(file, runs, rated, replace(looks, taken=number), withheld)
        state = replace(state, look=number, verdicts=tuple(verdicts))
        if state.decided:
            return state
    return state


def _evaluated_alike(
    runs: Mapping[str, Runs],
) -> tuple[dict[str, dict[int, RunNumbers]], tuple[Why, ...]]:
    """The runs, the finished ones reduced to the evaluations that all of them made, as `compare` reduces them."""
    finished = [
        (arm, seed)
        for arm, side in runs.items()
        for seed, run in side.items()
        if run.status == "finished"
    ]
    reduced, notes = at_common_evaluations([runs[arm][seed] for arm, seed in finished])
    found = {arm: dict(side) for arm, side in runs.items()}
    for (arm, seed), run in zip(finished, reduced, strict=True):
        found[arm][seed] = run
    return found, tuple(notes)


def _judge_look(
    file: StudyFile,
    runs: Mapping[str, Runs],
    rated: Mapping[float, Mapping[str, Runs]],
    looks: Looks,
    withheld: Why | None,
) -> list[Verdict]:
    """Every primary of every arm, corrected as one family."""
    base, found = file.study.baseline, []
    seeds = file.seeds[: looks.plan[looks.taken - 1]]
    for primary in file.study.primary:
        question = replace(question_of(primary), equal=file.study.equal)
        if file.study.stuck_at is not None:
            question = replace(question, stuck_at=file.study.stuck_at)
        over_rates = primary.measure == "lr_sensitivity"
        kinds = list(rated.values()) if over_rates else [runs]
        for arm in file.study.arms:
            if arm.name == base:
                continue
            before, after = (
                Group(name, tuple(kind[name][seed] for kind in kinds for seed in seeds))
                for name in (base, arm.name)
            )
            why = withheld or (_why_untrained(before, after) if over_rates else None)
            judged = verdict(question, before, after, looks, why)
            if over_rates and not math.isnan(judged.estimate.mean):
                judged = replace(judged, note=_beside_sensitivity(before, after))
            found.append(judged)
    return correct(found, looks)


def question_of(primary: Primary) -> Question:
    """The question that a primary asks."""
    if primary.measure in COSTS:
        question = cost_question(primary.measure.removesuffix("_to_target"), primary.target)
    elif primary.measure == "lr_sensitivity":
        read = _read_sensitivity(primary.rates or ())
        title = "learning-rate sensitivity"
        question = Question(primary.measure, title, "nats/token", "", read, "difference")
    else:
        question = Question(
            primary.measure, "final loss", "nats/token", "", final_loss, "difference"
        )
    return replace(
        question, key=primary.measure, direction=primary.direction, margin=primary.margin
    )


def _read_sensitivity(rates: Sequence[float]) -> Callable[..., float]:
    def read(*runs: RunNumbers) -> float:
        """A diverged run counts with its loss before training, so every seed has a number."""
        losses = [run.final_loss for run in runs]
        return sensitivity(rates, losses, float(runs[0].evaluated["val_loss"][0]))

    return read


def _best_losses(group: Group) -> dict[int, float]:
    """The lowest final loss over the learning rates by seed, of those seeds where any run finished."""
    found = {}
    for seed, runs in group.by_seed.items():
        losses = [run.final_loss for run in runs if run.final_loss is not None]
        if losses:
            found[seed] = min(losses)
    return found


def _why_untrained(before: Group, after: Group) -> Why | None:
    """Every loss would be that before training, as if nothing depended on the rate."""
    for group in (before, after):
        best = _best_losses(group)
        for seed in group.seeds:
            if seed not in best:
                text = f"with seed {seed} no run of {group.label} finished, at any learning rate"
                return Why("not_judged", f"not judged: {text}")
    return None


def _beside_sensitivity(before: Group, after: Group) -> str:
    """A recipe that learns little at every rate is not sensitive either: its best loss stands beside."""
    base, arm = (
        sum(losses.values()) / len(losses) for losses in map(_best_losses, (before, after))
    )
    failed = sum(run.status != "finished" for run in after.runs)
    note = f"its best loss is {arm:.3f} on average, {before.label}'s {base:.3f}"
    return note + (f"; {failed} of its {len(after.runs)} runs diverged" if failed else "")
