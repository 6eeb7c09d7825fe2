"""A runner that trains nothing: final losses by arm, setting and seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

from efftrain_cli.foundation.errors import StoppedError
from efftrain_cli.run.directory import runs_root
from efftrain_cli.run.manifest import REQUIRED, write_manifest
from efftrain_cli.run.reading import Run
from efftrain_cli.trials.trial import Trial
from tests.compare.runs import make_run

RECIPE = """\
[model]
n_layer = 1
n_head = 1
n_embd = 32
seq_len = 32
[data]
train = "text.txt"
valid = "text.txt"
tokenizer = "bpe:300"
[optim]
lr = 1e-3
[train]
tokens = 2560
batch_size = 8
[eval]
every = 5
windows = 4
"""


class Fake:
    """Remembers what it was asked for; `loss` gives the final loss of a trial, None: diverged.
    If it saves, runs have begun long ago and have a checkpoint."""

    def __init__(
        self,
        loss: Callable[[Trial], float | None],
        stop_after: int | None = None,
        saves: bool = False,
    ) -> None:
        self.loss = loss
        self.saves = saves
        self.asked: list[list[str]] = []
        self.trained: list[str] = []
        self.stop_after = stop_after

    def train(self, trials: Sequence[Trial], title: str = "") -> list[Run]:
        if self.stop_after is not None and len(self.asked) >= self.stop_after:
            raise StoppedError("stopped")
        self.asked.append([trial.name for trial in trials])
        runs = []
        for trial in trials:
            if trial.name not in self.trained:
                self.trained.append(trial.name)
                if self.saves:
                    save(trial.name)
            runs.append(self.run_of(trial))
        return runs

    def run_of(self, trial: Trial) -> Run:
        final = self.loss(trial)
        losses = [6.0, 6.5] if final is None else [6.0, 5.0, final]
        status = "diverged" if final is None else "finished"
        run = make_run(trial.arm, trial.seed, losses, status=status)
        settings = dict(text.split("=") for text in trial.settings)
        values = {**run.settings, **{key: float(value) for key, value in settings.items()}}
        begun = {"started": "2026-01-01"} if self.saves else {}
        conditions = {**run.conditions, **begun}
        own = {"name": trial.name, "settings": values, "conditions": conditions}
        return Run(**{**vars(run), **own})


def save(name: str) -> None:
    """Write a checkpoint of a run."""
    folder = runs_root() / name / "checkpoints" / "step-00000001"
    folder.mkdir(parents=True)
    for file in REQUIRED:
        (folder / file).write_text("{}")
    write_manifest(folder, dict.fromkeys(REQUIRED, sha256(b"{}").hexdigest()))


def recipes(folder: Path, *names: str) -> None:
    """Write a recipe of each name, all alike but for their rates, and a text."""
    (folder / "text.txt").write_text("some words\n" * 1000)
    for number, name in enumerate(names, 1):
        text = RECIPE.replace("1e-3", f"{number}e-3")
        (folder / f"{name}.toml").write_text(text)
