"""The record of a running session: rows as steps finish, checkpoints as they come due, and the
report of a divergence.

Every rank has a logbook and calls the same methods. Rank 0's has the run directory and the screen;
the others' write nothing.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any, NoReturn

import torch

from efftrain_cli.foundation.console import listed, printable, say
from efftrain_cli.foundation.errors import DiskError, DivergedError, RecipeError, UnsoundError
from efftrain_cli.foundation.signals import ask_to_stop, stop_asked
from efftrain_cli.foundation.tensors import Tensors
from efftrain_cli.model.generate import Sampling
from efftrain_cli.plan.plan import plan_step
from efftrain_cli.recipe.recipe import Recipe, load_recipe
from efftrain_cli.run.directory import RunDirectory, checkpoints_of
from efftrain_cli.run.metrics import latest_rows
from efftrain_cli.run.origin import read_origin
from efftrain_cli.run.stability import (
    PROBE,
    LossSpikeDetector,
    fluctuations,
    validation_curve,
)
from efftrain_cli.training import checkpoint, dist
from efftrain_cli.training.display import TrainingDisplay
from efftrain_cli.training.loading import generate_text, load_run_tokenizer
from efftrain_cli.training.record import StepRecord, finite_or_none, read_records
from efftrain_cli.training.session import Session, compute_again
from efftrain_cli.training.stages import GrowthRecord, growth_message
from efftrain_cli.training.state import TrainState

SAMPLE_TOKENS = 48
"""Tokens of a text that is shown while training."""
MOST_SAVING = 0.05
"""Share of the time that saving may block training without a warning."""
READ_EVERY = 1.0
"""Seconds between two readings of records from a CUDA device: they wait for it."""


def saves_beside(device: torch.device) -> bool:
    """Return whether checkpoints are written beside the next steps, from a copy in host memory.

    The cores of a CPU are busy with the steps, and its memory with the state.
    """
    return device.type == "cuda"


class Logbook:
    """Writes a session's records to its run directory and shows them. One per session."""

    def __init__(
        self,
        run: RunDirectory | None,
        state: TrainState,
        session: Session,
        screen: TrainingDisplay | None,
    ) -> None:
        """Begin at the progress of `state`; only rank 0 has `run` and `screen`."""
        self._run = run
        self._state = state
        self._session = session
        self._screen = screen
        self._pending: list[StepRecord] = []
        self._good = state.progress
        """After the last step whose loss and gradient were finite."""
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._host: dict[str, Tensors] | None = {} if saves_beside(session.device) else None
        """Copies of the tensors that are saved while training goes on, by file."""
        self._writing: tuple[checkpoint.Writing, Future[float]] | None = None
        self._started = self._last_read = self._last_save = time.monotonic()
        self._checkpoint_seconds = 0.0
        self._named_seconds = 0.0
        self._spikes = LossSpikeDetector()
        self._warned = False
        self._fault = ""
        """Why the run ends without a save."""
        self._threshold = float(os.environ.get(PROBE) or math.inf)
        self._curve: list[float] = []
        """Validation losses of a probe."""
        if run is not None and self._threshold < math.inf and state.progress.step:
            rows = latest_rows(run.path, state.progress.step)
            self._curve = [loss for _, loss in validation_curve(rows)]
        self.val_loss: float | None = None
        """Newest validation loss, nats per token."""

    def add(self, record: StepRecord | GrowthRecord) -> None:
        """Take one record; read, write and show what is due, and save the state if it is due."""
        self._note(record)
        if isinstance(record, StepRecord) and record.saves:
            self.save()

    # --- rank 0 ---

    def _note(self, record: StepRecord | GrowthRecord) -> None:
        if self._run is None or self._screen is None:
            return
        if isinstance(record, GrowthRecord):
            self._run.event("growth", dataclasses.asdict(record))
            self._screen.say(growth_message(record))
            self.val_loss = record.val_loss_after
            self._good = self._state.progress
            return
        self._pending.append(record)
        on_cpu = self._session.device.type == "cpu"
        if on_cpu or record.is_evaluated or time.monotonic() - self._last_read >= READ_EVERY:
            self.flush()

    def flush(self) -> None:
        """Read the pending records, write them as rows and show them; ask all ranks to stop if one
        was not finite."""
        if self._run is None or self._screen is None:
            return
        if self._writing is not None and self._writing[1].done():
            self.finish_save()
        records = self._pending
        self._pending = []
        rows = read_records(self._state, self._session.recipe, records)
        self._last_read = time.monotonic()
        for record, row in zip(records, rows, strict=True):
            self._complete(record, row)
        self._run.log(rows)

        for record, row in zip(records, rows, strict=True):
            if row.get("nonfinite"):
                ask_to_stop("a divergence")
                return
            self._screen.show(row)
            if spike := self._spikes.read(row):
                self._run.event("spike", spike._asdict())
                self._screen.say(str(spike))
            if record.is_evaluated and not self._is_sound(row):
                return
            self._good = record.progress._replace(
                train_seconds=row["train_seconds"],
                best_loss=self._state.progress.best_loss,
            )
        if rows and rows[-1]["val_loss"] is not None and not stop_asked():
            self._show_sample(rows[-1]["step"])

    def _is_sound(self, row: Mapping[str, Any]) -> bool:
        """Take a validation loss; return whether it lets the run go on."""
        step = row["step"]
        self.val_loss = row["val_loss"]
        if self.val_loss is None:
            self._note_unsound(step, f"step {step}: the validation loss is not finite")
            return False
        if self._threshold < math.inf:
            self._curve.append(self.val_loss)
            if max(fluctuations(self._curve)) > self._threshold:
                above = f"the validation perplexity is above {self._threshold:g} times its best"
                self._note_fault(step, f"step {step}: {above}")
                return False
        return True

    def _complete(self, record: StepRecord, row: dict[str, Any]) -> None:
        """Add the seconds that were not training to a row, and the written columns if a stop
        abandoned its evaluation."""
        if record.plan is None and record.progress.step and self._run is not None:
            for key, value in self._run.row_of(record.progress.step).items():
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

    def _show_sample(self, step: int) -> None:
        """Show how the model continues `eval.sample`, and record it as an event.

        Training is untouched, as sampling has its own random numbers.
        """
        prompt = self._session.recipe.eval.sample
        if prompt is None or self._run is None or self._screen is None:
            return
        tokenizer = load_run_tokenizer(self._run.path)
        sampling = Sampling(seed=self._session.recipe.seed)
        model = self._state.model
        text = "".join(generate_text(model, tokenizer, prompt, sampling, SAMPLE_TOKENS))
        self._run.event("sample", {"step": step, "prompt": prompt, "text": text})
        shown = printable(prompt + text, keep="\n\t")
        self._screen.say(f"--- after step {step:,}: {shown}")

    # --- all ranks ---

    def save(self, at_end: bool = False) -> None:
        """Save the state; on CUDA beside the next steps, at most one at a time, but `at_end`.

        A disk that refuses ends the run only `at_end`: going on may find room at the next save.

        Raises:
            DivergedError: a loss or gradient was not finite, and the state before it is saved; or a
                weight, moment or validation loss was not, and nothing is saved.
            ReplicaError: as `checkpoint.begin_save`.
            DiskError: the disk refused, on rank 0.
        """
        self.flush()
        before = time.monotonic()
        self.finish_save()
        if self._state.nonfinite:
            self._raise_diverged()
        (fault,) = dist.gather_objects(self._fault)[:1]
        if fault:
            raise DivergedError(fault)
        try:
            writing = checkpoint.begin_save(
                self._run, self._state, self._session.recipe, self._host
            )
            if writing is not None:
                self._writing = writing, self._pool.submit(writing.write)
        except UnsoundError as error:
            self._raise_unsound(str(error))
        except DiskError as error:
            self._note_refusal(error, self._state.progress.step, at_end)
        if at_end or self._host is None:
            self.finish_save(at_end)
        self._warn_of_saves(time.monotonic() - before)

    def finish_save(self, at_end: bool = False) -> None:
        """Wait for the checkpoint that is being written, and record it.

        Raises:
            DiskError: as `save`.
        """
        if self._writing is None:
            return
        writing, written = self._writing
        self._writing = None
        while not written.done():
            # A signal that comes just before a wait without limit is handled after it.
            wait([written], timeout=0.2)
        try:
            writing.record(written.result())
        except DiskError as error:
            self._note_refusal(error, writing.progress.step, at_end)

    def _note_refusal(self, error: DiskError, step: int, at_end: bool) -> None:
        """Record that the disk refused a checkpoint of rank 0, or end the run by it."""
        assert self._run is not None
        if at_end or self._run.gone:
            raise error
        self._run.event("save_failed", {"step": step, "reason": str(error)})
        say(f"warning: not saved, training goes on. {error}")

    def _warn_of_saves(self, seconds: float) -> None:
        """Count the seconds that a save held training up; warn once if that takes much of the
        time."""
        now = time.monotonic()
        between = now - self._last_save
        self._checkpoint_seconds += seconds
        self._last_save = now
        # The first interval holds the start, and a save of some milliseconds says nothing.
        much = seconds > MOST_SAVING * between and seconds > 0.5
        if much and not self._warned and self._screen is not None:
            self._warned = True
            self._screen.say(
                f"warning: saving took {seconds:.1f} s of the last {between:.0f} s"
                f" ({seconds / between:.0%}):"
                f" raise checkpoint.every (now {self._session.recipe.checkpoint.every})"
            )

    def _raise_unsound(self, what: str) -> NoReturn:
        """End the run; save nothing. The checkpoints that exist are the way back."""
        if self._run is not None:
            self._note_unsound(self._state.progress.step, what)
        raise DivergedError(dist.gather_objects(self._fault)[0])

    def _note_unsound(self, step: int, what: str) -> None:
        assert self._run is not None
        sound = [path for path in checkpoints_of(self._run.path) if path not in self._run.corrupt]
        last = "there is no checkpoint from before that"
        if sound:
            last = f"the last valid checkpoint is {sound[-1].name}"
        advice = way_on(self._run, self._session.recipe)
        self._note_fault(step, what, f"; not saved: {last}{advice}")

    def _note_fault(self, step: int, what: str, advice: str = "") -> None:
        """Record, on rank 0, why the run must end without a save; all ranks stop."""
        assert self._run is not None
        self._run.event("diverged", {"step": step, "reason": what})
        self._fault = f"{what}{advice}"
        ask_to_stop("a divergence")

    def _raise_diverged(self) -> NoReturn:
        """Save the state before the first step that was not finite, and end the run.

        No update was applied from that step on, so weights and moments are still those before it.
        Its gradient is computed again for the report, as nothing was measured for it during
        training. If the weights were not finite before the step, its gradient shows no cause, and
        nothing is saved.
        """
        state = self._state
        recipe = self._session.recipe
        state.progress = dist.gather_objects(self._good)[0]
        state.nonfinite.zero_()
        before = state.progress.step
        plan = plan_step(recipe, state.progress, state.sharing[1])
        saved = "is not saved: the gradients in flight are later ones"
        cause = "gradients of several steps are applied at once: no layer is named"
        norms: dict[str, float] = {}
        if recipe.delayed_gradients is None:
            saved = self._save_before_divergence()
            loss, norms = compute_again(self._session, state, plan)
            bad = [layer for layer, norm in norms.items() if not math.isfinite(norm)]
            cause = "recomputed, the same step is finite: memory or hardware may be faulty"
            if bad:
                cause = f"gradients of {listed(bad)}"
            elif not math.isfinite(loss):
                cause = "the loss"

        advice = ""
        if self._run is not None:
            advice = way_on(self._run, recipe)
            starts = self._session.train_data.starts(plan.window_start, plan.windows)
            report = {
                "step": plan.step,
                "reason": cause,
                "lr": plan.lr,
                "seq_len": plan.seq_len,
                "batch_size": plan.batch_size,
                "window_start": plan.window_start,
                "window_tokens": starts.tolist(),
                "grad_norm_by_layer": {name: finite_or_none(x) for name, x in norms.items()},
            }
            self._run.event("diverged", report)
        raise DivergedError(
            f"step {plan.step}: the loss or a gradient is not finite"
            f" ({cause}); step {before} {saved}{advice}"
        )

    def _save_before_divergence(self) -> str:
        """Save the state, and say whether it is saved."""
        try:
            checkpoint.save(self._run, self._state, self._session.recipe)
        except UnsoundError as error:
            self._raise_unsound(str(error))
        except DiskError as error:
            assert self._run is not None
            step = self._state.progress.step
            self._run.event("save_failed", {"step": step, "reason": str(error)})
            return f"could not be saved: {error}"
        return "is saved"


def way_on(run: RunDirectory, recipe: Recipe) -> str:
    """Return a command that gets past a divergence, on a line of its own.

    It begins again at the learning rate of the recipe that was named, if the run has another; else
    it continues at half of the rate. "" if stages have rates of their own.
    """
    if any(stage.lr is not None for stage in recipe.stages):
        return ""
    own = named = recipe.optim
    with_rate = None
    name = str(read_origin(run.path)["recipe"])
    # The recipe may have gone since, or not allow the rate.
    with suppress(RecipeError):
        named = load_recipe(name).optim
        with_rate = load_recipe(name, [f"optim.lr={own.lr!r}"])
    rate = named.lr
    least = named.min_lr
    words = f"{run.path / 'recipe.toml'} --name {run.name}-2"
    if rate == own.lr:
        rate = least = own.lr / 2
        words = f"--resume {run.name} --override-resume"
    elif with_rate == recipe:
        return f"\n  at {rate:g}: efftrain pretrain {name} --name {run.name}-2"
    words += f" --set optim.lr={rate:g}"
    if own.min_lr > rate:
        words += f" --set optim.min_lr={least:g}"
    return f"\n  at {rate:g}: efftrain pretrain {words}"
