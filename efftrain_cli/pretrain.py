"""`efftrain pretrain`: from a recipe and text to a trained GPT, in a run directory that can be
killed and continued. Every rank runs these functions; rank 0 has the run directory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Literal

from efftrain_cli.foundation.console import make_console, print_folded, say, silence, steady_output
from efftrain_cli.foundation.errors import EfftrainError, StoppedError
from efftrain_cli.foundation.signals import Stop, check_stop, stop_on_signals, stop_reason
from efftrain_cli.plan.preview import PlanSummary
from efftrain_cli.recipe.recipe import Recipe, dump_recipe, load_recipe
from efftrain_cli.run.directory import (
    RunDirectory,
    checkpoints_of,
    existing_run,
    new_run,
    run_path,
)
from efftrain_cli.trackers import tensorboard
from efftrain_cli.training import dist, resuming
from efftrain_cli.training.branch import Branch
from efftrain_cli.training.display import screen_of, show_header, show_result, show_steps
from efftrain_cli.training.loading import check_not_orphaned, load_newest, newest_recipe
from efftrain_cli.training.logbook import Logbook
from efftrain_cli.training.memory import memory_errors, peak_memory
from efftrain_cli.training.origin import begin_segment, environment_of, origin_of
from efftrain_cli.training.record import keep_rate
from efftrain_cli.training.session import (
    Session,
    bf16_speedup,
    choose_device,
    cut_warning,
    fresh_state,
    plan_run,
    prepare_session,
    probe_seconds,
)
from efftrain_cli.training.stages import train_stages
from efftrain_cli.training.state import TrainState


def start(
    recipe: Recipe,
    *,
    recipe_name: str,
    name: str,
    device: str,
    steps: int | None,
    with_probe: bool,
    verify_data: Literal["lazy", "full"],
    branch: Branch | None,
) -> Path:
    """Train `recipe` in a new run directory, up to step `steps`, and return it.

    Args:
        branch: what the run begins with instead of random weights; it has the same recipe.

    Raises:
        EfftrainError: any fault a user can act on; its class says which.
    """
    if recipe.wandb.tensorboard:
        tensorboard.check_installed()
    if branch is not None:
        branch.check()
    with processes():
        with preparation():
            corpus = None
            if branch is not None:
                corpus = resuming.text_of(branch.parent, recipe)
            session = prepare_session(recipe, choose_device(device), corpus, verify_data)
            state = fresh_state(session)
            if branch is not None:
                branch.begin(state, session.corpus)
            plan = plan_run(session, steps, state.progress)
        resuming.check_disk(run_path(name), recipe, session.corpus.vocab_size)
        make_directory(name, session, recipe_name, branch)
        with opened_run(name) as run:
            if run is not None:
                run.event("start", environment_of(session))
                segment = run.next_segment()
                state.progress = state.progress._replace(segment=segment)
            train(run, state, session, plan, steps, with_probe)
    return run_path(name)


def resume(
    name: str,
    *,
    device: str,
    steps: int | None,
    with_probe: bool,
    verify_data: Literal["lazy", "full"],
    overrides: Sequence[str],
    override: bool,
    from_start: bool,
) -> Path:
    """Continue run `name` from its newest valid checkpoint, as if it had never stopped.

    Args:
        overrides: `key=value` changes of the run's recipe.
        override: accept a recipe or data that differ from what the run was started with.
        from_start: begin again at step 1 if the run has no checkpoint.

    Raises:
        EfftrainError: any fault a user can act on; its class says which.
    """
    path = existing_run(name)
    recipe = load_recipe(str(path / "recipe.toml"), overrides)
    if recipe.wandb.tensorboard:
        tensorboard.check_installed()
    with processes(), opened_run(name) as run:
        written = newest_recipe(path)
        recipe, changes = resuming.accepted_recipe(path, written, recipe, overrides, override)
        with preparation():
            corpus = resuming.text_of(path, recipe)
            session = prepare_session(recipe, choose_device(device), corpus, verify_data)
            of_data = resuming.check_data(path, session.corpus, override)
            state = fresh_state(session)
            loaded = load_newest(path, state, recipe)
        if loaded.path is None:
            check_not_orphaned(path)
            resuming.check_beginning(path, from_start)
        if loaded.recipe != written:  # of an older checkpoint
            changes = resuming.check_recipe(path, loaded.recipe, recipe, override)

        plan = plan_run(session, steps, state.progress)
        # A stop abandons the evaluation of its last step, and its checkpoint keeps saying so.
        is_due = False
        if run is not None and state.progress.evaluation_due:
            is_due = run.row_of(state.progress.step).get("val_loss") is None
        (is_due,) = dist.agree(is_due)
        if plan.steps == state.progress.step and not is_due:
            if run is not None:
                print_folded(resuming.nothing_left(name, state.progress, recipe, steps))
            dist.barrier()
            return path
        vocab_size = session.corpus.vocab_size
        resuming.check_disk(path, recipe, vocab_size, len(checkpoints_of(path)))

        # Nothing is written before all that refuses to go on, on any rank.
        dist.barrier()
        begin_segment(run, state, session, loaded, changes + of_data)
        train(run, state, session, plan, steps, with_probe)
    return path


# --- a run's beginning ----------------------------------------------------------------------------


@contextmanager
def processes() -> Iterator[None]:
    """Join the processes of the run, which stop on signals; all but rank 0 print only errors."""
    with steady_output(), stop_on_signals(), dist.joined():
        if not dist.is_main():
            silence()
        yield


@contextmanager
def preparation() -> Iterator[None]:
    """Prepare the data and build the model inside; a stop meanwhile trains nothing."""
    try:
        yield
        check_stop()
    except Stop:
        raise StoppedError(
            f"stopped by {stop_reason()} while data and model were prepared: no step was trained\n"
            "  give the same command again"
        ) from None


def make_directory(
    name: str,
    session: Session,
    recipe_name: str,
    branch: Branch | None,
) -> None:
    """Make the directory of a new run, on rank 0."""
    if not dist.is_main():
        return
    origin = origin_of(session, recipe_name)
    recipe = dump_recipe(session.recipe)
    if branch is not None:
        origin |= branch.origin
    with new_run(name, recipe, origin, session.corpus.tokenizer_path) as run:
        if branch is not None:
            branch.copy_into(run)


def opened_run(name: str) -> AbstractContextManager[RunDirectory | None]:
    """Own a run directory on rank 0; the others have None."""
    if dist.is_main():
        return RunDirectory.open(name)
    return nullcontext()


# --- training -------------------------------------------------------------------------------------


def train(
    run: RunDirectory | None,
    state: TrainState,
    session: Session,
    summary: PlanSummary,
    until: int | None,
    with_probe: bool,
) -> None:
    """Train to the end of the budget or step `until`; record the end, whatever it is."""
    recipe = session.recipe
    resumed = ""
    if run is not None:
        if state.progress.step:
            resumed = f"{run.name} after step {state.progress.step:,}"
        else:
            show_header(make_console(), run, session, summary)
        warning = cut_warning(recipe, summary)
        if warning:
            say(f"warning: {warning}")
            run.event("devices", {"reason": warning})
    status = "failed"
    try:
        with memory_errors(recipe, summary), dist.peer_errors_of_model():
            has_steps = summary.steps > state.progress.step  # else only an evaluation is left
            seconds = speedup = None
            # No rank of a ring has a whole model.
            is_ring = state.division is not None and recipe.delayed_gradients is not None
            if with_probe and has_steps and not is_ring:
                seconds = probe_seconds(session, state, summary)
                speedup = bf16_speedup(session, state, summary, seconds)
            show_steps(make_console(), recipe, summary, seconds, speedup, resumed)
            if state.division is None:
                # Other kinds of processors may draw other last bits.
                dist.broadcast(list(state.weights().values()))
                dist.broadcast(list(state.optimizer.tensors().values()))
            val_loss = train_and_log(run, state, session, summary, until)
        status = "paused"
        if state.progress.tokens >= recipe.train.tokens:
            status = "finished"
    except OSError:
        status = "disk"
        raise
    except EfftrainError as error:
        status = type(error).__name__.removesuffix("Error").lower()
        raise
    finally:
        if run is not None:
            run.event("end", {"status": status, "step": state.progress.step})
    if run is not None:
        keep_rate(run, session)
        if val_loss is not None:
            show_result(make_console(), run, session, state.progress, val_loss)


def train_and_log(
    run: RunDirectory | None,
    state: TrainState,
    session: Session,
    summary: PlanSummary,
    until: int | None,
) -> float | None:
    """Train, write rows and checkpoints as they come due, and save the end; return the newest
    validation loss, nats per token.

    Raises:
        StoppedError: a signal came; the last finished step is saved.
        DivergedError, DiskError: as `Logbook.save`.
    """
    stopped = False
    recipe = session.recipe
    with screen_of(run, state.progress, recipe, summary) as screen:
        book = Logbook(run, state, session, screen)
        records = train_stages(state, recipe, session.train_data, session.val_windows, until)
        try:
            for record in records:
                book.add(record)
        except Stop:
            stopped = True
            state.model.zero_grad(set_to_none=True)
        book.save(at_end=True)
    # torchrun ends the others once a process has ended with an error, and rank 0 may still save.
    memory = dist.gather_objects(peak_memory(session.device))
    if stopped:
        raise stopped_error(run, state.progress.step)
    if run is not None:
        run.event("memory", {"by_rank": memory})
    return book.val_loss


def stopped_error(run: RunDirectory | None, step: int) -> StoppedError:
    """Return the error of a stop, and record its reason on rank 0."""
    reason = stop_reason()
    where = "before the first step"
    if step:
        where = f"after step {step}, which is saved"
    fix = ""
    if run is not None:
        run.event("signal", {"signal": reason, "step": step})
        fix = f"\n  continue: efftrain pretrain --resume {run.name}"
    return StoppedError(f"stopped by {reason} {where}{fix}")
