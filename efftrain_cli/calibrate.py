"""Time steps of existing runs side by side (`efftrain calibrate`), so that `compare` can judge
training seconds.

Steps of one finished run of each recipe run again through the `train()` that pretrain uses, on
random tokens, in blocks: every step of every recipe once, recipe by recipe, in the opposite order
in every second block. What else the machine does meanwhile falls on all recipes alike.
"""

from __future__ import annotations

import math
import platform
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from efftrain_cli import __version__
from efftrain_cli.bench import random_windows
from efftrain_cli.compare.comparability import why_seconds_differ
from efftrain_cli.compare.groups import Group, runs_of
from efftrain_cli.compare.reading import STEP_COLUMNS, kinds_of_steps
from efftrain_cli.data.windows import Windows
from efftrain_cli.foundation.errors import DivergedError, UsageError
from efftrain_cli.foundation.records import utc_now
from efftrain_cli.foundation.step import Batch, Progress, StepPlan
from efftrain_cli.model.kernels import choose_determinism
from efftrain_cli.recipe.recipe import Recipe, load_recipe
from efftrain_cli.run.calibrations import ArmTimes, Calibration, StepTimes, digest_of_recipe
from efftrain_cli.run.metrics import read_metrics
from efftrain_cli.training.build import build_state, compute_dtype
from efftrain_cli.training.memory import building_errors
from efftrain_cli.training.session import device_name
from efftrain_cli.training.state import TrainState
from efftrain_cli.training.trainer import StepRecord, train

SHARE = 0.02
"""Most of the runs' training seconds that a calibration takes, unless FEWEST_BLOCKS of two steps a
kind need more."""
MOST_STEPS = 16
"""Steps timed in a block, unless two of each kind are more."""
FEWEST_BLOCKS = 3
ENOUGH_BLOCKS = 12
MOST_BLOCKS = 50
"""If there would be fewer than ENOUGH_BLOCKS, fewer steps are timed."""


@dataclass(frozen=True)
class TimedStep:
    """A step of a run, to be run again."""

    kind: int
    flops: float
    seconds: float
    """Median of the run's steps like it."""
    before: Progress
    """`plan_step` makes the step of it, at the learning rate of the run's first."""


@dataclass(frozen=True)
class Arm:
    """A recipe to time."""

    recipe: Recipe
    name: str
    """As the command line named the recipe."""
    run: str
    digest: str
    vocab_size: int
    kinds: Sequence[Sequence[TimedStep]]
    """One step for each number of FLOPs, rising, of each kind."""


@dataclass(frozen=True)
class Design:
    """What a calibration measures."""

    steps: Sequence[Sequence[TimedStep]]
    """By arm."""
    blocks: int

    @property
    def seconds(self) -> float:
        """Expected seconds of all blocks, with the one that is not measured."""
        once = sum(step.seconds for step in chain.from_iterable(self.steps))
        return (1 + self.blocks) * once


def check_machine(groups: Sequence[Group], device: torch.device) -> None:
    """Check that the runs' steps can be timed together, and here. Take the runs' number of threads.

    Raises:
        UsageError: they cannot.
    """
    if len(groups) < 2:
        raise UsageError(
            "calibrate times two recipes or more side by side\n"
            "  name finished runs of each; `efftrain runs list` shows them"
        )
    runs = runs_of(groups)
    reason = why_seconds_differ(runs)
    if reason:
        raise UsageError(f"these runs cannot be timed side by side: {reason}")
    origin = runs[0].origin
    for key, value in (("device", device_name(device)), ("torch", torch.__version__)):
        if origin.get(key) != value:
            raise UsageError(
                f"these runs were trained with {key} {origin.get(key)}, and this is {value}\n"
                "  give the command where they were trained"
            )
    if device.type == "cpu" and isinstance(origin.get("threads"), int):
        torch.set_num_threads(origin["threads"])


def choose_arms(groups: Sequence[Group], paths: Mapping[str, Path]) -> list[Arm]:
    """Return the recipes to time, each by its first run.

    Args:
        paths: name of a run -> its directory.
    """
    arms = []
    for group in groups:
        run = group.runs[0]
        arms.append(
            Arm(
                recipe=load_recipe(str(paths[run.name] / "recipe.toml")),
                name=run.recipe_name,
                run=run.name,
                digest=digest_of_recipe(run.recipe),
                vocab_size=run.origin["data"]["vocab_size"],
                kinds=_read_steps(paths[run.name]),
            )
        )
    return arms


def _read_steps(path: Path) -> list[list[TimedStep]]:
    """Return the first step of each kind and number of FLOPs, by kind, with rising FLOPs."""
    counts = ("windows", "sequences", "tokens")
    frame = read_metrics(path, ("step", "batch_size", "seconds", *counts, *STEP_COLUMNS)).frame
    frame["kind"] = kinds_of_steps(frame)
    before = frame.shift()
    frame[[*counts]] = before[[*counts]]
    # After a row that is lost, the counts before the step are unknown.
    frame = frame[frame.flops.notna() & (frame.seconds > 0) & (before.step == frame.step - 1)]
    alike = frame.groupby(["kind", "flops"])
    frame = frame.assign(seconds=alike.seconds.transform("median"))
    kinds: dict[int, list[TimedStep]] = {}
    for row in frame.drop_duplicates(["kind", "flops"]).sort_values("flops").itertuples():
        progress = Progress(
            step=int(row.step) - 1,
            stage=row.kind // 2,
            windows=int(row.windows),
            sequences=int(row.sequences),
            tokens=int(row.tokens),
            batch_size=int(row.batch_size),
        )
        step = TimedStep(row.kind, row.flops, row.seconds, progress)
        kinds.setdefault(row.kind, []).append(step)
    return list(kinds.values())


def design(arms: Sequence[Arm], spent: float) -> Design:
    """Choose steps and blocks: the most steps that leave ENOUGH_BLOCKS, and as many blocks as SHARE
    allows.

    Args:
        spent: training seconds of all runs.
    """
    for most in range(MOST_STEPS, 1, -1):
        steps = []
        for arm in arms:
            chosen = [spread(kind, most) for kind in arm.kinds]
            steps.append(list(chain.from_iterable(chosen)))
        once = Design(steps, 0)
        # One block more runs unmeasured.
        blocks = int(SHARE * spent / once.seconds) - 1
        if sum(map(len, steps)) <= MOST_STEPS and blocks >= ENOUGH_BLOCKS:
            break
    return replace(once, blocks=min(max(blocks, FEWEST_BLOCKS), MOST_BLOCKS))


def spread(steps: Sequence[TimedStep], count: int) -> list[TimedStep]:
    """Return at most `count` of steps with rising FLOPs: the ends, and those nearest to equal
    distances."""
    if len(steps) <= count:
        return list(steps)
    flops = np.array([step.flops for step in steps])
    places = {int(np.abs(flops - at).argmin()) for at in np.linspace(flops[0], flops[-1], count)}
    return [steps[place] for place in sorted(places)]


class ReadyWindows(Windows):
    """Windows whose batch of the timed step lies ready, as if it had been fetched during the step
    before."""

    def __init__(self, windows: Windows) -> None:
        super().__init__(
            windows.shards, windows.seq_len, windows.seed, pin_memory=windows.pin_memory
        )
        self.timed = 0
        """Number of the step that is timed."""
        self._ready: dict[int, Batch] = {}

    def batch(self, plan: StepPlan, rank: int = 0, world_size: int = 1) -> Batch:
        """Return the batch; a timed step's is read once."""
        if plan.step != self.timed:
            return super().batch(plan, rank, world_size)
        if plan.step not in self._ready:
            self._ready[plan.step] = super().batch(plan, rank, world_size)
        return self._ready[plan.step]


class Lane:
    """A recipe on the device, ready to run any of its steps."""

    def __init__(
        self, arm: Arm, steps: Sequence[TimedStep], device: torch.device, folder: Path
    ) -> None:
        self.arm = arm
        self.recipe = replace(
            arm.recipe,
            train=replace(arm.recipe.train, tokens=10**15),
            eval=replace(arm.recipe.eval, every=10**9),
        )
        folder.mkdir()
        self.windows = ReadyWindows(random_windows(self.recipe, arm.vocab_size, folder))
        validation = self.windows.validation(1)
        self.stages: dict[int, tuple[TrainState, Iterator[StepRecord]]] = {}
        for stage in sorted({step.before.stage for step in steps}):
            with building_errors(self.recipe, arm.vocab_size, device, stage, trains_on=device):
                state = build_state(self.recipe, arm.vocab_size, device, stage)
            self.stages[stage] = (state, train(state, self.recipe, self.windows, validation))

    def run(self, step: TimedStep) -> StepRecord:
        """Run a step."""
        state, stepping = self.stages[step.before.stage]
        state.progress = step.before
        self.windows.timed = step.before.step + 1
        # It holds for the whole process, and another arm may have set it.
        choose_determinism(self.recipe.train.deterministic)
        # Before its first step a state is evaluated.
        return next(record for record in stepping if record.plan is not None)


class Timed(NamedTuple):
    """A step that is timed once a block."""

    lane: Lane
    step: TimedStep
    seconds: list[float]
    """By block."""


def time_blocks(arms: Sequence[Arm], plan: Design, device: torch.device) -> list[Timed]:
    """Run the blocks; return the steps in the order of the first block.

    Raises:
        UsageError: a step is not the run's any more.
        DivergedError: a loss was not finite.
    """
    timed = []
    with tempfile.TemporaryDirectory() as name:
        lanes = []
        for number, (arm, steps) in enumerate(zip(arms, plan.steps, strict=True)):
            lanes.append(Lane(arm, steps, device, Path(name) / str(number)))
        # The first step of every recipe, then the second, and so on.
        for steps in zip_longest(*plan.steps):
            for lane, step in zip(lanes, steps, strict=True):
                if step is not None:
                    timed.append(Timed(lane, step, []))
        for each in timed:
            _check_step(each.lane, each.step)

        for block in range(plan.blocks):
            order = timed[:: (-1) ** block]
            records = [each.lane.run(each.step) for each in order]
            # Read late, so that no step waits for the device.
            for each, record in zip(order, records, strict=True):
                assert record.training is not None
                each.seconds.append(record.training.seconds() - record.compile_seconds)
    for lane in lanes:
        if any(bool(state.nonfinite) for state, _ in lane.stages.values()):
            raise DivergedError(f"a loss of {lane.arm.name} was not finite: its times do not count")
    return timed


def _check_step(lane: Lane, step: TimedStep) -> None:
    """Run a step unmeasured, and check that it is the run's."""
    record = lane.run(step)
    assert record.result is not None
    if not math.isclose(record.result.flops, step.flops, rel_tol=1e-9):
        raise UsageError(
            f"step {step.before.step + 1} of {lane.arm.run} has {step.flops:.6g} FLOPs in its row"
            f" and {record.result.flops:.6g} now\n"
            "  time its steps with the efftrain version that trained it"
        )


def measure(arms: Sequence[Arm], plan: Design, device: torch.device) -> Calibration:
    """Time the steps; raise as `time_blocks`."""
    times = []
    timed = time_blocks(arms, plan, device)
    for arm in arms:
        steps = []
        for each in timed:
            if each.lane.arm is arm:
                kind = each.step.kind
                flops = each.step.flops
                steps.append(StepTimes(kind=kind, flops=flops, seconds=each.seconds))
        dtype = compute_dtype(arm.recipe, device)
        times.append(
            ArmTimes(recipe=arm.name, digest=arm.digest, run=arm.run, dtype=dtype, steps=steps)
        )
    return Calibration(
        schema_version=Calibration.newest,
        time=utc_now(),
        efftrain=__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        device=device_name(device),
        device_kind=device.type,
        devices=1,
        threads=torch.get_num_threads(),
        arms=times,
    )
