"""The record of a running session: rows as steps finish, checkpoints as they come due, and its
seconds by purpose."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from efftrain_cli.data.tokenizer import Tokenizer
from efftrain_cli.foundation.console import harmless
from efftrain_cli.foundation.errors import DiskError, UnsoundError
from efftrain_cli.foundation.signals import Stop, rescued_by, stop_asked, stop_reason
from efftrain_cli.model.generate import Sampling
from efftrain_cli.run.directory import Run
from efftrain_cli.run.metrics import latest_rows
from efftrain_cli.run.stability import (
    PROBE,
    LossSpikeDetector,
    fluctuation,
    validation_curve,
)
from efftrain_cli.training.checkpoints import save
from efftrain_cli.training.devices import Devices
from efftrain_cli.training.display import TrainingDisplay
from efftrain_cli.training.divergence import (
    raise_diverged,
    raise_fluctuating,
    raise_unsound,
)
from efftrain_cli.training.session import Session
from efftrain_cli.training.stages import (
    GrowthRecord,
    growth_message,
    train_stages,
)
from efftrain_cli.training.state import TrainState
from efftrain_cli.training.trained_model import generate_text, load_run_tokenizer
from efftrain_cli.training.trainer import StepRecord, read_records, saves_at

SAMPLE_TOKENS = 48
"""Tokens of a text that is shown while training."""
MOST_SAVING = 0.05
"""Share of the time that saving may block training without a warning."""


class Logbook:
    """Writes a session's records to its run directory and shows them. One per session."""

    def __init__(
        self,
        run: Run,
        state: TrainState,
        session: Session,
        devices: Devices,
        screen: TrainingDisplay,
    ) -> None:
        self._run = run
        self._state = state
        self._session = session
        self._devices = devices
        self._screen = screen
        self._is_saved = state.progress.step > 0
        """Whether the run has a checkpoint to continue from."""
        # Reading waits for the device, so on CUDA records are read about once a second.
        self._read_every = 1.0
        if session.device.type == "cpu":
            self._read_every = 0.0
        self._pending: list[StepRecord] = []
        self._good = state.progress
        """After the last step whose loss and gradient were finite."""
        self._started = self._last_save = self._last_read = time.monotonic()
        self._checkpoint_seconds = 0.0
        self._named_seconds = 0.0
        self._warned = False
        self._spikes = LossSpikeDetector()
        self._threshold = float(os.environ.get(PROBE) or math.inf)
        self._curve: list[tuple[int, float]] = []
        if self._threshold < math.inf and state.progress.step:
            self._curve = validation_curve(latest_rows(run.path, state.progress.step))
        self._tokenizer: Tokenizer | None = None
        self.val_loss: float | None = None
        """Newest validation loss, nats per token."""

    def add(self, record: StepRecord) -> None:
        """Take one record; read, write and save what is due. Raises as `flush`."""
        self._pending.append(record)
        by_steps = saves_at(self._session.recipe.checkpoint, record.progress.step)
        seconds = self._session.recipe.checkpoint.seconds_to_save(not self._is_saved)
        by_time = time.monotonic() - self._last_save >= seconds
        save_due = record.progress.step > 0 and (by_steps or by_time)
        save_due = save_due and self._devices.ready_to_save()
        read_due = time.monotonic() - self._last_read >= self._read_every
        # The last record has a validation loss, so nothing stays unread.
        if save_due or read_due or record.val_loss is not None:
            self.flush()
        if save_due:
            self._save()

    def add_growth(self, record: GrowthRecord) -> None:
        """Take the record of a growth between two steps."""
        self._run.event("growth", dataclasses.asdict(record))
        self._screen.say(growth_message(record))
        if record.val_loss_after is not None:
            self.val_loss = record.val_loss_after
        self._good = self._state.progress

    def flush(self) -> None:
        """Read the pending records, write them as rows and show them.

        Raises:
            DivergedError: a loss or gradient was not finite. The state is then that before the
                step.
        """
        records = self._pending
        self._pending = []
        rows = read_records(self._state, self._session.recipe, records)
        self._last_read = time.monotonic()
        for record, row in zip(records, rows, strict=True):
            self._complete(record, row)
        self._run.log(rows)

        for record, row in zip(records, rows, strict=True):
            if row.get("nonfinite"):
                raise_diverged(
                    self._run, self._state, self._session, self._devices, record, self._good
                )
            self._show(row)
            if record.val_loss is not None and row["val_loss"] is None:
                what = f"step {row['step']}: the validation loss is not finite"
                raise_unsound(self._run, self._state, self._session, what)
            if row["val_loss"] is not None and self._threshold < math.inf:
                self._curve.append((row["step"], row["val_loss"]))
                if fluctuation(self._curve)[0] > self._threshold:
                    raise_fluctuating(self._run, record.progress, self._threshold)

            losses = [x for x in (row.get("loss"), self._good.best_loss) if x is not None]
            self._good = record.progress._replace(
                train_seconds=row["train_seconds"],
                best_loss=min(losses, default=None),
            )
        self._good = self._state.progress

        prompt = self._session.recipe.eval.sample
        if prompt is not None and rows and rows[-1]["val_loss"] is not None and not stop_asked():
            self._show_sample(self._state.progress.step, prompt)

    def _show(self, row: dict[str, Any]) -> None:
        """Show a row, and record what is unusual about it."""
        self._screen.show(row)
        if row["val_loss"] is not None:
            self.val_loss = row["val_loss"]
        if spike := self._spikes.read(row):
            self._run.event("spike", spike._asdict())
            self._screen.say(str(spike))

    def _show_sample(self, step: int, prompt: str) -> None:
        """Show how the model continues `prompt`, and record it as an event.

        Training is untouched, as sampling has its own random numbers; a signal may stop it, as the
        rows are written.
        """
        if self._tokenizer is None:
            self._tokenizer = load_run_tokenizer(self._run.path)
        sampling = Sampling(seed=self._session.recipe.seed)
        with self._session.ranks.interruptible():
            text = "".join(
                generate_text(self._state.model, self._tokenizer, prompt, sampling, SAMPLE_TOKENS)
            )
        self._run.event("sample", {"step": step, "prompt": prompt, "text": text})
        self._screen.say(f"--- after step {step:,}: {harmless(prompt + text)}")

    def _complete(self, record: StepRecord, row: dict[str, object]) -> None:
        """Add the seconds that were not training to a row, and the written columns if a stop
        abandoned its evaluation."""
        if not record.plan and record.progress.step > 0:
            written = self._run.row_of(record.progress.step)
            for key, value in written.items():
                if row.get(key) is None:
                    row[key] = value
        wall = self._last_read - self._started
        row["checkpoint_seconds"] = self._checkpoint_seconds
        row["wall_seconds"] = wall
        self._named_seconds += self._checkpoint_seconds
        self._checkpoint_seconds = 0.0
        for watch in (record.training, record.evaluation):
            if watch:
                self._named_seconds += watch.seconds()
        row["other_seconds"] = max(0.0, wall - self._named_seconds)
        self._named_seconds = max(wall, self._named_seconds)

    def save(self) -> float:
        """Save the state, unless it is saved already; return the seconds it took.

        Raises:
            DivergedError: the state holds a value that is not finite, and is not saved.
            DiskError: the disk refused.
        """
        try:
            return save(self._run, self._state, self._session.recipe, self._devices)
        except UnsoundError as error:
            raise_unsound(self._run, self._state, self._session, str(error))

    def _save(self) -> None:
        try:
            seconds = self.save()
        except DiskError as error:
            if self._run.gone:
                raise
            # Stopping would lose the steps since the last checkpoint; going on may find room at the
            # next one.
            self._run.event(
                "save_failed", {"step": self._state.progress.step, "reason": str(error)}
            )
            print(f"warning: not saved, training goes on. {error}", file=sys.stderr)
            seconds = 0.0
        self._is_saved = True
        now = time.monotonic()
        between = now - self._last_save
        self._checkpoint_seconds += seconds
        self._last_save = now
        # The first interval holds the start, and a save of some milliseconds says nothing.
        if seconds > MOST_SAVING * between and seconds > 0.5 and not self._warned:
            self._warned = True
            self._screen.say(
                f"warning: saving took {seconds:.1f} s of the last {between:.0f} s"
                f" ({seconds / between:.0%}):"
                f" raise checkpoint.every (now {self._session.recipe.checkpoint.every})"
            )


def train_and_log(
    run: Run,
    state: TrainState,
    session: Session,
    devices: Devices,
    until: int | None,
    screen: TrainingDisplay,
) -> float | None:
    """Train to the end of the budget or to step `until`, write rows and checkpoints as they come
    due, and save the end.

    Return the last validation loss, nats per token.

    Raises:
        Stop: a signal came; the last finished step is saved.
        DivergedError: a loss or gradient was not finite, and the state before that step is saved;
            or weights, moments or a validation loss were not finite, and nothing is saved.
        DiskError: the last checkpoint could not be written.
    """
    recipe = session.recipe
    book = Logbook(run, state, session, devices, screen)

    def stop() -> None:
        book.flush()
        book.save()
        run.sync()
        if not devices.is_whole:
            what = "the processes held parts of the state between two checkpoints"
            screen.say(f"{what}: continue from the newest checkpoint")

    with stopped_by(stop, state, devices, lambda: print(report_stop(run, state), file=sys.stderr)):
        for record in train_stages(
            state, recipe, session.train_data, session.val_windows, until, devices
        ):
            if isinstance(record, GrowthRecord):
                book.add_growth(record)
                continue
            book.add(record)
    book.save()
    devices.end(state)
    return book.val_loss


@contextmanager
def stopped_by(
    stop: Callable[[], None],
    state: TrainState,
    devices: Devices,
    report: Callable[[], None],
) -> Iterator[None]:
    """Call `stop`, which saves the last step, if a signal or lost process ends the training inside.

    Another thread does so if the main thread hangs, and calls `report` too.
    """

    def stop_here() -> None:
        state.model.zero_grad(set_to_none=True)
        stop()

    def stop_from_another_thread() -> None:
        stop_here()
        report()

    try:
        with rescued_by(stop_from_another_thread):
            yield
    except devices.survivable(state) as error:
        stop_here()
        if isinstance(error, Stop):
            devices.after_stop(state)
        raise


def report_stop(run: Run, state: TrainState) -> str:
    """Record a stop as the run's end; return the message for the user."""
    reason = stop_reason()
    step = state.progress.step
    run.event("signal", {"signal": reason, "step": step})
    run.event("end", {"status": "stopped", "step": step})
    where = "before the first step"
    if step:
        where = f"after step {step}, which is saved"
    return f"stopped by {reason} {where}\n  continue: efftrain pretrain --resume {run.name}"
