"""One probe of `efftrain tune-warmup`: a run that ends as soon as its verdict is clear, with its receipt."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from efftrain_cli.data.windows import Windows
from efftrain_cli.foundation.console import say
from efftrain_cli.foundation.errors import DivergedError
from efftrain_cli.foundation.signals import stop_reason
from efftrain_cli.plan.preview import summarize_plan
from efftrain_cli.recipe.recipe import dump_recipe
from efftrain_cli.run.directory import Run
from efftrain_cli.training.checkpoints import check_disk, load_checkpoint, newest_checkpoint, save
from efftrain_cli.training.devices import Devices
from efftrain_cli.training.display import TrainingDisplay
from efftrain_cli.training.logger import Logbook, stopped_by
from efftrain_cli.training.memory import memory_errors
from efftrain_cli.training.session import Session, environment_of, fresh_state, origin_of
from efftrain_cli.training.state import TrainState
from efftrain_cli.training.trainer import train
from efftrain_cli.training.worker import share_state, start_workers
from efftrain_cli.tune_warmup.receipts import write_receipt
from efftrain_cli.tune_warmup.search import Probe, Receipt, Search
from efftrain_cli.tune_warmup.verdict import fluctuation

if TYPE_CHECKING:
    from rich.console import Console


def run_probe(
    folder: Path,
    search: Search,
    probe: Probe,
    session: Session,
    recipe_name: str,
    console: Console,
    number: int,
) -> Receipt:
    """Runs a probe, or what is left of it, until its verdict is clear. `number` counts, from 0, the probes that this
    process has run, and `session` is the search's."""
    recipe = search.recipe_of(probe)
    # The text in the order of the probe's seed.
    pinned = session.train_data.pin_memory
    windows = Windows(session.corpus.train, recipe.model.seq_len, recipe.seed, pin_memory=pinned)
    session = replace(session, recipe=recipe, train_data=windows)
    state = fresh_state(session)
    with _open_probe(folder / "probes", probe, session, recipe_name, state) as run:
        curve = [
            (int(row["step"]), float(row["val_loss"]))
            for row in (
                run.rows(state.progress.step) if state.progress.step else ()
            )  # the beginning is validated anew
            if row.get("val_loss") is not None
        ]
        with TrainingDisplay(
            console, search.tokens_of(probe), state.progress.tokens, probe.horizon
        ) as screen:
            try:
                check_disk(run.path, state, recipe)
                with memory_errors(recipe, summarize_plan(recipe, until=probe.horizon)):
                    start_workers(run.path, state, session, probe.horizon, number)
                    devices = share_state(state, session)
                    _train_until_clear(run, state, session, devices, search, probe, curve, screen)
            except DivergedError:
                # The run's events have the details; for the search, a loss that is not finite is a verdict.
                curve.append((state.progress.step + 1, math.inf))
        worst, at = fluctuation(curve)
        stable = worst <= search.threshold
        # The search may ask it for more, and needs its checkpoint then.
        goes_on = stable and probe.horizon < search.grid.horizon(probe.start, probe.steps)
        if goes_on:
            save(run, state, recipe, devices)
        run.event("end", {"status": "finished", "step": state.progress.step, "stable": stable})
        rows = run.rows(state.progress.step)

        def largest(column: str) -> float | None:
            return max((row[column] for row in rows if row.get(column) is not None), default=None)

        receipt = Receipt(
            probe=probe,
            stable=stable,
            max_fluctuation=worst,
            fluctuation_step=at,
            stopped_at_step=state.progress.step,
            tokens=state.progress.tokens,
            seconds=sum(row.get("seconds", 0.0) + row["eval_seconds"] for row in rows),
            curve=tuple(curve),
            max_grad_norm=largest("grad_norm"),
            max_adam_sqrt_v=largest("adam_sqrt_v_max"),
            max_loss_ratio=largest("loss_ratio"),
        )
        write_receipt(run.path, receipt)
        if not goes_on:
            forget_checkpoints(run.path)
        # Last: where another rank was asked to stop, this ends the search, and the probe is finished.
        devices.rewind()
    return receipt


def forget_checkpoints(path: Path) -> None:
    """Removes the checkpoints of a probe that will not be continued."""
    shutil.rmtree(path / "checkpoints", ignore_errors=True)


def _open_probe(
    root: Path, probe: Probe, session: Session, recipe_name: str, state: TrainState
) -> Run:
    """The probe's run directory: a new one, or the one that was left, whose newest checkpoint goes into `state`."""
    if not (root / probe.name / "recipe.toml").is_file():
        origin = origin_of(session, recipe_name)
        run = Run.create(
            probe.name, dump_recipe(session.recipe), origin, session.corpus.tokenizer_path, root
        )
        run.event("start", environment_of(session))
        return run
    run = Run.open(probe.name, root)
    checkpoint = newest_checkpoint(run)
    if checkpoint is not None:
        load_checkpoint(checkpoint, state, session.recipe)
    segment = run.next_segment()
    state.progress = state.progress._replace(segment=segment)
    run.event(
        "resume", {"step": state.progress.step, "segment": segment, **environment_of(session)}
    )
    return run


def _train_until_clear(
    run: Run,
    state: TrainState,
    session: Session,
    devices: Devices,
    search: Search,
    probe: Probe,
    curve: list[tuple[int, float]],
    screen: TrainingDisplay,
) -> None:
    """Trains to the probe's horizon, or until its perplexity has fluctuated above the threshold. Extends `curve`."""
    book = Logbook(run, state, session, devices, screen)

    def stop() -> None:
        book.flush()
        save(run, state, session.recipe, devices)
        run.event("end", {"status": "stopped", "step": state.progress.step})
        run.sync()

    def report() -> None:
        say(f"stopped by {stop_reason()}: give the same command again to go on")

    with stopped_by(stop, state, devices, report):
        for record in train(
            state,
            session.recipe,
            session.train_data,
            session.val_windows,
            probe.horizon,
            devices,
        ):
            book.add(record)
            if record.val_loss is None:
                continue
            curve.append((record.progress.step, float(record.val_loss)))
            if fluctuation(curve)[0] > search.threshold:
                return
