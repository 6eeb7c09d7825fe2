"""A sweep without training: children that write the run that `pretrain` would write, and end when
the test says so."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from efftrain_cli.recipe.recipe import dump_recipe
from efftrain_cli.trials.trial import Trial, grid, recipe_of
from tests.fake_runs import rows_of, write_run, write_sealed

TINY = """\
[model]
n_layer = 1
n_head = 1
n_embd = 32
seq_len = 32
[data]
train = "text.txt"
valid = "valid.txt"
tokenizer = "bpe:300"
repeat = true
[optim]
lr = 1e-3
[train]
tokens = 2560
batch_size = 8
micro_batch_tokens = 1024
dtype = "fp32"
[eval]
every = 5
windows = 4
[checkpoint]
every = 5
"""


STUDY = """\
seeds = "5..6"
baseline = "plain"
set = ["train.tokens=12800"]
[[primary]]
measure = "final_loss"
direction = "equivalent"
margin = 4.0
[tuning]
seeds = "0"
grid = { "optim.lr" = [1e-3, 2e-3] }
[[arms]]
name = "plain"
recipe = "plain.toml"
[[arms]]
name = "warm"
recipe = "warm.toml"
"""


def write_recipes(folder: Path) -> Path:
    """Write two recipes that can be trained in a second, and their text; return the folder."""
    (folder / "plain.toml").write_text(TINY)
    (folder / "warm.toml").write_text(
        'base = "plain.toml"\n[seq_len_warmup]\nstart = 8\nsteps = 4\n'
    )
    words = [f"word{i % 97} and line{i % 31}" for i in range(4000)]
    (folder / "text.txt").write_text("\n".join(words))
    (folder / "valid.txt").write_text("\n".join(reversed(words[:800])))
    return folder


def plain(*seeds: int) -> list[Trial]:
    """Return trials of plain.toml."""
    return grid(["plain.toml"], seeds, {})


def both(*seeds: int) -> list[Trial]:
    """Return trials of plain.toml and warm.toml."""
    return grid(["plain.toml", "warm.toml"], seeds, {})


class Stub:
    """Stands for a child process: ends after `polls` looks with `code`, or saved with 75 when it is
    asked to."""

    def __init__(self, polls: int, finish: Callable[[int], None], code: int) -> None:
        self.left = polls
        self.finish = finish
        self.code = code
        self.signals: list[int] = []

    def poll(self) -> int | None:
        self.left -= 1
        if signal.SIGTERM in self.signals:
            self.code = 75
        elif self.left > 0:
            return None
        self.finish(self.code)
        return self.code

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    def wait(self) -> int:
        while True:
            code = self.poll()
            if code is not None:
                return code


class Pretrain:
    """A Launch that starts stubs. `codes` gives the exit code of a run where it is not 0."""

    def __init__(
        self, trials: Sequence[Trial], codes: Mapping[str, int] | None = None, polls: int = 1
    ) -> None:
        self.by_name = {trial.name: trial for trial in trials}
        self.codes = dict(codes or {})
        self.polls = polls
        self.calls: list[str] = []
        self.children: dict[str, Stub] = {}
        self.under_way = 0
        self.most = 0
        self.on_launch: Callable[[str], None] = lambda name: None

    def __call__(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Stub:
        resumed = "--resume" in arguments
        name = arguments[list(arguments).index("--resume" if resumed else "--name") + 1]
        self.calls.append(("resume " if resumed else "") + name)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("first line\nthe last words\n")
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        child = Stub(self.polls, lambda code: self._finish(name, code), self.codes.pop(name, 0))
        self.children[name] = child
        self.on_launch(name)
        return child

    def _finish(self, name: str, code: int) -> None:
        self.under_way -= 1
        write_trial(self.by_name[name], code)


def write_trial(trial: Trial, code: int = 0) -> None:
    """Writes the run of a trial as it is after its process ended with `code`."""
    root = Path(os.environ["EFFTRAIN_RUNS"])
    path = root / trial.name
    if not path.exists():
        write_run(root, Path(trial.recipe).stem, trial.seed, name=trial.name, rows=[])
        (path / "recipe.toml").write_text(dump_recipe(recipe_of(trial)))
    speed = 1.3 if "warm" in trial.recipe else 1.0
    speed += 0.5 if "optim.lr=2e-3" in trial.settings and "warm" in trial.recipe else 0
    rows = rows_of(50 if code else 100, trial.seed, speed)
    # The budget of the tiny recipes is 2560 tokens; of n times as many the loss is 0.2 ln n lower.
    times = recipe_of(trial).train.tokens / 2560
    for row in rows:
        row["tokens"] = times * row["step"] * 2560 / 100
        row["total_flops"] *= times
        if row.get("val_loss"):
            row["val_loss"] -= 0.2 * math.log(times) * row["step"] / 100
    if code == 4:
        rows[-1]["nonfinite"] = True
    # Rows with checks are read several times as fast.
    write_sealed(path / "metrics.jsonl", rows)
