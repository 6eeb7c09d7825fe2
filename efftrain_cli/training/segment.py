"""The beginning of a run's next segment: what it goes on with, and its record."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from efftrain_cli.foundation.console import say
from efftrain_cli.foundation.files import write_whole
from efftrain_cli.foundation.step import Progress
from efftrain_cli.recipe.recipe import Recipe, dump_recipe
from efftrain_cli.run.directory import Run
from efftrain_cli.run.metrics import check_nothing_trained
from efftrain_cli.run.origin import (
    check_not_orphaned,
    origin_data,
    read_origin,
    write_origin,
)
from efftrain_cli.training import dist, resuming
from efftrain_cli.training.checkpoint import Loaded, read_recipe
from efftrain_cli.training.origin import environment_now, origin_of
from efftrain_cli.training.session import Session
from efftrain_cli.training.state import TrainState


def accepted_recipe(
    run: Path,
    written: Recipe,
    recipe: Recipe,
    overrides: Sequence[str],
    override: bool,
) -> tuple[Recipe, resuming.Differences]:
    """Return the recipe that a run goes on with, and what it newly differs in from that of its
    checkpoint; otherwise as `resuming.check_recipe`."""
    if any(each.partition("=")[0].strip() == "train.tokens" for each in overrides):
        recipe, only_longer = resuming.trained_longer(run.name, written, recipe)
        if only_longer:
            differences = resuming.computed_differences(written, recipe)
            return recipe, resuming.not_accepted(run, differences)
    differences = resuming.check_recipe(run, written, recipe, override)
    return recipe, differences


def check_beginning(run: Path, from_start: bool) -> None:
    """Check that a run without a checkpoint may begin at step 1.

    Raises:
        CheckpointError: its first weights came from another run, or it has trained before and
            `from_start` is not given.
    """
    check_not_orphaned(run)
    if not from_start:
        check_nothing_trained(run)


def was_evaluated(run: Run | None, progress: Progress) -> bool:
    """Return whether the last step of a run was evaluated. Its checkpoint, written by a stop, keeps
    saying that it was not; a resumed run has written the loss into the step's row."""
    lacks = False
    if run is not None and progress.evaluation_due:
        lacks = run.row_of(progress.step).get("val_loss") is None
    return not dist.agree(lacks)[0]


def begin_segment(
    run: Run,
    state: TrainState,
    session: Session,
    loaded: Loaded,
    changes: resuming.Differences,
    dropped: str,
) -> None:
    """Record, on rank 0, that the run goes on from a checkpoint or from its beginning."""
    recipe = session.recipe
    rate = run.row_of(state.progress.step).get("lr")
    change = resuming.rate_change(
        rate,
        state.progress,
        loaded.recipe,
        recipe,
    )
    if change:
        print(change)
    for path, reason in loaded.passed_over:
        run.corrupt.add(path)
        run.event("fallback", {"checkpoint": path.name, "reason": reason})
    after = -1
    name = None
    if loaded.path is not None:
        run.verified.add(loaded.path)
        after = state.progress.segment
        name = loaded.path.name
    if changes:
        run.event("override", {"differences": changes})
    text = dump_recipe(recipe)
    if text != dump_recipe(read_recipe(run.path)):
        write_whole(run.path / "recipe.toml", text)
    if dropped:
        say(f"warning: {dropped}")
        run.event("in_flight_dropped", {"step": state.progress.step, "reason": dropped})
    origin = read_origin(run.path)
    data: dict[str, object] = {"corpus": session.corpus.key}
    if origin_data(run.path)["train_hash"] is None:  # imported, and first trained now
        data |= origin_of(session, run.name)["data"]
    if not data.items() <= origin["data"].items():
        write_origin(run.path, {**origin, "data": origin["data"] | data})
    run.report_gaps(state.progress.step)
    segment = run.next_segment(after)
    state.progress = state.progress._replace(segment=segment)
    facts = {"step": state.progress.step, "segment": segment, "checkpoint": name}
    run.event("resume", {**facts, **environment_now(run, session)})
