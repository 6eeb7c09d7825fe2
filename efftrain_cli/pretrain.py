"""`efftrain pretrain`: from a recipe and text to a trained GPT, in a run directory that can be
killed and continued."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from efftrain_cli.data.windows import data_warnings, frequency_loss
from efftrain_cli.foundation.console import (
    counted,
    human_seconds,
    make_console,
    print_folded,
    print_labelled,
    say,
    steady_output,
)
from efftrain_cli.foundation.errors import EfftrainError, StoppedError, UsageError
from efftrain_cli.foundation.files import disk_error, write_whole
from efftrain_cli.foundation.records import sealed_toml
from efftrain_cli.foundation.signals import (
    Stop,
    interruptible,
    rescued_by,
    stop_on_signals,
    stop_reason,
)
from efftrain_cli.foundation.step import Progress
from efftrain_cli.plan.describe import (
    LABEL,
    is_stuck,
    model_line,
    result_line,
    steps_line,
    text_line,
)
from efftrain_cli.plan.plan import (
    plan_step,
)
from efftrain_cli.plan.preview import PlanSummary, staged_warnings, summarize_plan
from efftrain_cli.recipe.recipe import Recipe, dump_recipe, load_recipe
from efftrain_cli.run import tensorboard
from efftrain_cli.run.communication import communication
from efftrain_cli.run.directory import Run, checkpoints_of, existing_run, run_path, taken
from efftrain_cli.run.metrics import check_nothing_trained, last_row
from efftrain_cli.run.rates import FEWEST_STEPS, Rate, digest_of_training, remember_rate
from efftrain_cli.run.wandb import followed
from efftrain_cli.training import checkpoints
from efftrain_cli.training.build import compute_dtype
from efftrain_cli.training.display import TrainingDisplay
from efftrain_cli.training.joining import joined
from efftrain_cli.training.logger import report_stop, train_and_log
from efftrain_cli.training.memory import memory_errors, peak_memory
from efftrain_cli.training.session import (
    Session,
    choose_device,
    device_name,
    environment_now,
    environment_of,
    fresh_state,
    origin_of,
    prepare_session,
    probe_seconds,
)
from efftrain_cli.training.state import TrainState
from efftrain_cli.training.strategy import check_ranks, is_sharded
from efftrain_cli.training.worker import release_workers, run_worker, share_state, start_workers

if TYPE_CHECKING:
    from rich.console import Console


def start(
    recipe: Recipe,
    *,
    recipe_name: str,
    name: str | None = None,
    device: str = "auto",
    steps: int | None = None,
    with_probe: bool = True,
) -> Path:
    """Train `recipe` in a new run directory and return it.

    Raises:
        EfftrainError: any fault a user can act on; its class says which.
    """
    name = name or f"{recipe_name}-seed{recipe.seed}"
    if run_path(name).exists():  # before the data is prepared: a taken name costs nothing
        raise taken(name)
    _check_extra(recipe)
    with joined() as ranks, steady_output(), stop_on_signals():
        if ranks.rank:
            run_worker(device, ranks)
            return run_path(name)
        chosen = choose_device(device, ranks)
        with _without_trace():
            session = replace(prepare_session(recipe, chosen), ranks=ranks)
            plan = _plan(session, Progress(), steps)
            state = fresh_state(session)
        checkpoints.check_disk(run_path(name), recipe, session.corpus.vocab_size)
        origin = origin_of(session, recipe_name)
        with Run.create(name, dump_recipe(recipe), origin, session.corpus.tokenizer_path) as run:
            run.event("start", environment_of(session))
            return _train(run, state, session, plan, steps, with_probe)


def resume(
    name: str,
    *,
    device: str = "auto",
    steps: int | None = None,
    with_probe: bool = True,
    overrides: Sequence[str] = (),
    override: bool = False,
    from_start: bool = False,
) -> Path:
    """Continue run `name` from its newest valid checkpoint, as if it had never stopped.

    Args:
        overrides: `key=value` changes of the run's recipe.
        override: accept a recipe or data that differ from what the run was started with.
        from_start: begin again at step 1 if the run has no checkpoint.

    Raises:
        EfftrainError: any fault a user can act on; its class says which.
    """
    recipe_path = existing_run(name) / "recipe.toml"
    recipe = load_recipe(str(recipe_path), overrides)
    _check_extra(recipe)
    with joined() as ranks, steady_output(), stop_on_signals():
        if ranks.rank:
            run_worker(device, ranks)
            return recipe_path.parent
        chosen = choose_device(device, ranks)
        with Run.open(name) as run:
            checkpoint = checkpoints.newest_checkpoint(run)
            if checkpoint is None and not from_start:
                check_nothing_trained(run.path)
            written = checkpoints.read_recipe(checkpoint or run.path)
            accepted = checkpoints.accepted_differences(run)
            changes: checkpoints.Differences = []
            if any(key.partition("=")[0].strip() == "train.tokens" for key in overrides):
                recipe, longer = _trained_longer(run, written, recipe)
                changes += [entry for entry in longer if entry not in accepted]
            before = [*accepted, *changes]
            changes += checkpoints.check_recipe(run, checkpoint, recipe, before, override)
            checkpoints.check_text_is_named(run, overrides)
            with _without_trace():
                session = replace(prepare_session(recipe, chosen), ranks=ranks)
                changes += checkpoints.check_data(run, session.corpus, accepted, override)
                state = fresh_state(session)
                if checkpoint is not None:
                    checkpoints.load_checkpoint(checkpoint, state, recipe)

            plan = _plan(session, state.progress, steps)
            if plan.steps == state.progress.step and not _lacks_evaluation(run, state.progress):
                print_folded(_nothing_left(run, state.progress, recipe, steps))
                release_workers(ranks)
                return run.path
            _show_rate(run, state.progress, written, recipe)
            existing = len(checkpoints_of(run.path))
            checkpoints.check_disk(run.path, recipe, session.corpus.vocab_size, existing)

            # Nothing is written before all that refuses to go on.
            if changes:
                run.event("override", {"differences": changes})
            if overrides:
                write_whole(recipe_path, sealed_toml(dump_recipe(recipe)))
            _begin_segment(run, state, session, written, checkpoint)
            return _train(run, state, session, plan, steps, with_probe)


def _check_extra(recipe: Recipe) -> None:
    """Check that what the recipe asks for is installed, before anything is spent."""
    if recipe.wandb.tensorboard:
        tensorboard.check_installed()


def _begin_segment(
    run: Run,
    state: TrainState,
    session: Session,
    written: Recipe,
    checkpoint: Path | None,
) -> None:
    """Record that the run goes on from `checkpoint`, of the recipe `written`; None means from its
    beginning."""
    reason = checkpoints.drop_in_flight(run, state, written, session.recipe)
    if reason is not None:
        say(f"warning: {reason}")
    checkpoints.record_first_data(run, origin_of(session, run.name)["data"])
    run.report_gaps(state.progress.step)
    segment = run.next_segment(-1 if checkpoint is None else state.progress.segment)
    state.progress = state.progress._replace(segment=segment)
    run.event(
        "resume",
        {
            "step": state.progress.step,
            "segment": segment,
            "checkpoint": checkpoint.name if checkpoint else None,
            **environment_now(run, session),
        },
    )


def _lacks_evaluation(run: Run, progress: Progress) -> bool:
    """Return whether the last step of a run is still to be evaluated. Its checkpoint, written by a
    stop, keeps saying so; a resumed run has written the loss into the step's row."""
    return progress.evaluation_due and run.row_of(progress.step).get("val_loss") is None


def _trained_longer(
    run: Run, written: Recipe, recipe: Recipe
) -> tuple[Recipe, checkpoints.Differences]:
    """Return the recipe of a run whose budget was raised, and the differences that need no
    --override-resume.

    Its learning-rate schedule ends where it was meant to, unless optim.decay_tokens says otherwise.
    Only if nothing else has changed do the differences need no --override-resume.

    Raises:
        UsageError: the learning rate would be 0 from the schedule's end on.
    """
    before, optim = written.train.tokens, recipe.optim
    if recipe.train.tokens <= before:
        return recipe, []
    if optim.has_end and optim.decay_steps is None:
        end = optim.decay_tokens or before
        # After a growth the schedule stands at fewer tokens than were trained, and need not have
        # ended.
        if optim.min_lr == 0 and end < recipe.train.tokens and not recipe.stages:
            raise UsageError(
                f"run {run.name!r}: its learning rate reaches optim.min_lr = 0 at {end:,} tokens,"
                " so training longer would change nothing\n"
                "  set where it ends,"
                f" --set optim.decay_tokens={recipe.train.tokens:_} --override-resume;"
                " the rate then jumps up, and the jump is shown before it happens"
            )
        recipe = replace(recipe, optim=replace(optim, decay_tokens=end))
    longer: dict[str, tuple[object, object]] = {
        "train.tokens": (before, recipe.train.tokens),
        "optim.decay_tokens": (None, before),
    }
    differences = checkpoints.computed_differences(written, recipe)
    if all(longer.get(key) == (old, new) for key, old, new in differences):
        return recipe, differences
    return recipe, []


def _nothing_left(run: Run, progress: Progress, recipe: Recipe, steps: int | None) -> str:
    """Return why a resumed run has no step to train."""
    if progress.tokens < recipe.train.tokens:
        return (
            f"nothing to train: run {run.name} is after step {progress.step} already,"
            f" and --steps {steps} ends there or before"
        )
    return (
        f"nothing to train: run {run.name} has used its budget of {recipe.train.tokens:,} tokens,"
        f" after step {progress.step:,}\n"
        "  to train to N tokens in all:"
        f" `efftrain pretrain --resume {run.name} --set train.tokens=N`"
    )


def _show_rate(run: Run, progress: Progress, written: Recipe, recipe: Recipe) -> None:
    """Print what a changed recipe does to the learning rate, before it does it."""
    last = run.row_of(progress.step).get("lr")
    unchanged = (written.optim, written.train) == (recipe.optim, recipe.train)
    if last is None or unchanged or progress.tokens >= recipe.train.tokens:
        return
    rate = plan_step(recipe, progress).lr
    change = (
        f"jumps from {last:.3g} to {rate:.3g}"
        if abs(rate - last) > 0.1 * last
        else f"goes on at {rate:.3g}"
    )
    print(f"lr      {change} with step {progress.step + 1:,}")


def _plan(session: Session, progress: Progress, steps: int | None) -> PlanSummary:
    """Plan the run from `progress` on. Raise a `RecipeError` if it reads the corpus more than once
    and the recipe does not allow that."""
    summary = summarize_plan(session.recipe, progress, session.corpus.vocab_size, steps)
    check_ranks(session.recipe, summary, session.ranks)
    session.train_data.check_budget(summary.windows, session.recipe.data)
    return summary


@contextmanager
def _without_trace() -> Iterator[None]:
    """Prepare the data and build the model inside; a stop meanwhile leaves nothing behind."""

    def stopped() -> str:
        when = "while data and model were prepared: no step was trained"
        return f"stopped by {stop_reason()} {when}\n  give the same command again"

    try:
        with rescued_by(lambda: say(stopped())), interruptible(rescuable=True):
            yield
    except Stop:
        raise StoppedError(stopped()) from None


def _train(
    run: Run,
    state: TrainState,
    session: Session,
    summary: PlanSummary,
    until: int | None,
    with_probe: bool,
) -> Path:
    recipe = session.recipe
    console = make_console()
    show_header(console, run, session, state, summary)
    # Where gradients decide the batch size, the plan's number of steps is only an assumption.
    steps = None if "steps" in recipe.varies else summary.steps
    try:
        with memory_errors(recipe, summary):
            # Else only an evaluation is left, or the whole model is on no device.
            has_steps = summary.steps > state.progress.step
            probes = with_probe and has_steps and not is_sharded(recipe, session.ranks)
            start_workers(run.path, state, session, until, probes=probes)
            show_steps(console, session, state, summary, probes)
            devices = share_state(state, session)
            with (
                followed(run.path, recipe.wandb.mode, tensorboard=recipe.wandb.tensorboard),
                TrainingDisplay(console, summary.tokens, state.progress.tokens, steps) as screen,
            ):
                val_loss = train_and_log(run, state, session, devices, until, screen)
                run.event("memory", peak_memory(session.device))
    except Stop:
        raise StoppedError(report_stop(run, state)) from None
    except (OSError, EfftrainError) as error:
        status = type(error).__name__.removesuffix("Error").lower()
        refused = None
        if isinstance(error, OSError):
            status = "disk"
            refused = disk_error(error)
        run.event("end", {"status": status, "step": state.progress.step})
        raise refused or error from None
    finished = state.progress.tokens >= recipe.train.tokens
    status = "finished" if finished else "paused"
    run.event("end", {"status": status, "step": state.progress.step})
    _remember_rate(run, session)
    if val_loss is not None:
        show_result(console, run, session, state, val_loss)
    return run.path


def _remember_rate(run: Run, session: Session) -> None:
    """Keep the speed of a run that one device trained in one go, for later estimates."""
    row = last_row(run.path)
    in_one_go = session.ranks.is_single_process and row.get("segment") == 0
    if not in_one_go or row["step"] < FEWEST_STEPS or not row["train_seconds"]:
        return
    model = session.recipe.model
    remember_rate(
        Rate(
            device=device_name(session.device),
            device_kind=session.device.type,
            source=f"run {run.name}",
            n_layer=model.n_layer,
            n_embd=model.n_embd,
            flops_per_second=row["total_flops"] / row["train_seconds"],
            flops_per_token=row["total_flops"] / row["tokens"],
            trained=digest_of_training(session.recipe),
            tokens_per_second=row["tokens"] / row["wall_seconds"],
        )
    )


def show_header(
    console: Console, run: Run, session: Session, state: TrainState, plan: PlanSummary
) -> None:
    """Print what is about to be trained, before anything is spent."""
    recipe = session.recipe
    corpus = session.corpus
    epochs = session.train_data.epochs(plan.windows)
    lines = [f"run     {run.name} on {_describe_place(session)}"]
    if state.progress.step:
        lines = [f"resumed {run.name} after step {state.progress.step:,} of {plan.steps:,}"]
    lines += [
        text_line(recipe, corpus.train.tokens, epochs),
        model_line(recipe, corpus.vocab_size),
    ]
    print_labelled(console, lines, indent=LABEL)

    warnings = data_warnings(session.train_data, plan.windows, session.val_windows.shape[0])
    for warning in (*corpus.notes, *warnings, *staged_warnings(recipe, plan.end)):
        console.print(f"warning: {warning}", markup=False)


def show_steps(
    console: Console, session: Session, state: TrainState, plan: PlanSummary, probes: bool
) -> None:
    """Print the steps, and their time by a probe that also shows whether memory suffices."""
    line = steps_line(session.recipe, plan)
    if probes:
        devices = session.ranks.world_size
        seconds = probe_seconds(session, state, plan) / devices
        shared = f", if {devices} devices share them at no cost" if devices > 1 else ""
        line += f"; about {human_seconds(seconds)} (probed{shared})"
    print_labelled(console, [line], indent=LABEL)


def _describe_place(session: Session) -> str:
    """Describe the devices that train, and how they compute."""
    recipe = session.recipe
    ranks = session.ranks
    place = str(session.device)
    if not ranks.is_single_process:
        sharded = " (sharded)" if is_sharded(recipe, ranks) else ""
        place = f"{ranks.world_size} x {session.device.type}{sharded}"
    if session.device.type == "cpu":
        place += f", {counted(torch.get_num_threads(), 'thread')}"
    place += f", {compute_dtype(recipe, session.device)}"
    if recipe.train.deterministic:
        place += ", deterministic kernels"
    return place


def show_result(
    console: Console, run: Run, session: Session, state: TrainState, loss: float
) -> None:
    """Print what came of the run, and the one command that goes on.

    Args:
        loss: last validation loss, nats per token.
    """
    corpus = session.corpus
    progress = state.progress
    frequencies = frequency_loss(corpus.train, session.val_windows, corpus.vocab_size)
    lines = [result_line(progress, loss, frequencies)]
    if not progress.step:
        lines = [f"result  not trained: val loss {loss:.4f} nats/token"]
    if spent := communication(run.path):
        lines.append(f"devices {spent}")
    print_labelled(console, lines, indent=LABEL)
    command = f'sample {run.name} --prompt "The"'
    if progress.tokens < session.recipe.train.tokens:
        command = f"pretrain --resume {run.name}"
    elif is_stuck(loss, frequencies):
        return
    # A command is not folded: a terminal's own line break is not copied with it.
    console.print(f"next    efftrain {command}", markup=False, soft_wrap=True)
