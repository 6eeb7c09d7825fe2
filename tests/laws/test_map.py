"""The map of docs/architecture.md: each addition is made to a copy of the package, in the files
that its row names, and each line that names the newest optimizer, schedule, column or question is
needed."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import REPOSITORY
from tests.launch import Process, Zygote

pytestmark = pytest.mark.slow
PAGE = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
TABLE = PAGE.split("### Adding something else")[1].split("### Adding a method")[0]


class Edit(NamedTuple):
    """A change of one file of the package."""

    file: str
    old: str
    new: str


TRAINED = """
import torch
from efftrain_cli.recipe.recipe import load_recipe
from efftrain_cli.trackers.rows import series_of
from efftrain_cli.training.loop import train
from efftrain_cli.training.record import read_records
from tests.resume_law import RandomTokens
from tests.tiny import FOUR_BLOCKS, fresh
recipe = load_recipe("small", [*FOUR_BLOCKS, *OVERRIDES])
state, data = fresh(recipe), RandomTokens(16)
records = list(train(state, recipe, data, torch.stack([data.window(9)]), 2))
row = read_records(state, recipe, records)[-1]
"""
"""Trains two steps with OVERRIDES."""
ASKED = """
from efftrain_cli.compare.measures import measures_of
keys = {measure.key for measure in measures_of([])}
"""
"""Lists the measures of every comparison."""
PLANNED = """
from efftrain_cli.plan.plan import plan_run
from efftrain_cli.recipe.recipe import load_recipe
rates = [plan.lr for plan, _ in plan_run(load_recipe("small", OVERRIDES))]
"""
"""Plans with OVERRIDES."""
LAWS = """
import sys
import pytest
file = "tests/laws/test_every_value.py"
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", file, "-k", f"{VALUE} and not two_ranks"]))
"""
"""Trains, resumes, grows and exports VALUE, or finds it refused: as every value of every
choice."""

ADDITIONS = {
    "a schedule": (
        [
            Edit("recipe/schedules.py", '"inverse_sqrt"]', '"inverse_sqrt", "halved"]'),
            Edit(
                "recipe/schedules.py",
                '    "constant": Schedule(',
                '    "halved": Schedule(lambda x: 0.5),\n    "constant": Schedule(',
            ),
        ],
        "OVERRIDES = ['optim.schedule=halved']" + PLANNED + "assert rates[-2] == (2e-3 + 2e-4) / 2",
    ),
    "a norm": (
        [
            Edit("model/config.py", '"rmsnorm", "none"]', '"rmsnorm", "gainless", "none"]'),
            Edit(
                "model/config.py",
                '    "none": NormFacts(',
                '    "gainless": NormFacts(vectors=()),\n    "none": NormFacts(',
            ),
            Edit(
                "model/block.py",
                '    if config.norm == "none":',
                '    if config.norm == "gainless":\n'
                "        return nn.RMSNorm(config.n_embd, elementwise_affine=False)\n"
                '    if config.norm == "none":',
            ),
        ],
        "OVERRIDES = ['model.norm=gainless']"
        + TRAINED
        + "from efftrain_cli.model.flops import parameter_count\n"
        "assert parameter_count(state.model.config) == state.model.parameter_count\n"
        "assert not [name for name, _ in state.model.named_parameters() if 'ln_' in name]",
    ),
    "an MLP": (
        [
            Edit("model/config.py", '"relu2"]', '"relu2", "reglu"]'),
            Edit(
                "model/config.py",
                '    "relu2": MlpFacts(',
                '    "reglu": MlpFacts(kept_arrays=3, is_gated=True),\n    "relu2": MlpFacts(',
            ),
            Edit("model/block.py", '    "relu2": relu', '    "reglu": F.relu,\n    "relu2": relu'),
        ],
        "VALUE = 'reglu'" + LAWS,
    ),
    "a kind of positions": (
        [
            Edit("model/config.py", '"learned", "rope"]', '"learned", "rope", "nope"]'),
            Edit(
                "model/config.py",
                '    "rope": PositionFacts(',
                '    "nope": PositionFacts(),\n    "rope": PositionFacts(',
            ),
        ],
        "VALUE = 'nope'" + LAWS,
    ),
    "an initialization": (
        [
            Edit("model/config.py", '"unit", "hf"]', '"unit", "hf", "wide"]'),
            Edit(
                "model/config.py",
                '    "hf": InitFacts(',
                '    "wide": InitFacts(std=0.1),\n    "hf": InitFacts(',
            ),
        ],
        "VALUE = 'wide'" + LAWS,
    ),
    "a column": (
        [
            Edit(
                "run/columns.py",
                '    Column("total_flops", "axis", drawn_as="flops"),',
                '    Column("total_flops", "axis", drawn_as="flops"),\n'
                '    Column("loss_squared", "internals", title="Square of the loss"),',
            ),
            Edit(
                "training/objective.py",
                '        columns = {"loss": losses["loss"]}\n',
                '        columns = {"loss": losses["loss"], "loss_squared": losses["loss"] ** 2}\n',
            ),
        ],
        "OVERRIDES = []" + TRAINED + "from efftrain_cli.run.reading import DRAWN\n"
        "assert row['loss_squared'] > 0\n"
        "assert 'loss_squared' in {column.name for column in DRAWN}\n"
        "assert series_of('loss_squared') == 'internals/loss_squared'",
    ),
    "a judge's row": (
        [
            Edit(
                "compare/measures.py",
                "    titles: dict[str, float] = {}\n",
                '    titles: dict[str, float] = {"last step": 0.0}\n',
            )
        ],
        ASKED + "assert 'last step' in keys",
    ),
    "a command": (
        [
            Edit(
                "cli/hello.py",
                "",
                "from efftrain_cli.cli.app import app\n\n\n@app.command()\ndef hello() -> None:\n"
                '    """Greet."""\n    print("hello")\n',
            ),
            Edit("cli/commands.py", '"verify-resume",', '"verify-resume", "hello",'),
        ],
        "import sys; sys.argv[1:] = ['hello']\nfrom efftrain_cli.__main__ import main\nmain()",
    ),
    "a recipe key": (
        [
            Edit(
                "recipe/sections.py",
                "    positions: bool = False\n",
                '    patience: int = 3\n    """Evaluations to wait."""\n    positions: bool ='
                " False\n",
            )
        ],
        (
            "from efftrain_cli.recipe.recipe import load_recipe\n"
            "assert load_recipe('small', ['eval.patience=5']).eval.patience == 5"
        ),
    ),
}
"""What is added -> the changes, and code that tries them."""

NEWEST = {
    "lion": (
        [
            Edit("optim/facts.py", '"muon", "lion"]', '"muon"]'),
            Edit(
                "optim/facts.py",
                '    "lion": OptimizerFacts('
                "has_second_moment=False, state_size=parameter_count),\n",
                "",
            ),
            Edit("training/build.py", "from efftrain_cli.optim.lion import Lion\n", ""),
            Edit("training/build.py", '    "lion": Lion,\n', ""),
        ],
        "OVERRIDES = ['optim.name=lion']"
        + TRAINED
        + "assert type(state.optimizer).__name__ == 'Lion'",
    ),
    "inverse_sqrt": (
        [
            Edit("recipe/schedules.py", '"wsd", "inverse_sqrt"]', '"wsd"]'),
            Edit(
                "recipe/schedules.py",
                '    "inverse_sqrt": Schedule(math.sqrt, has_end=False, needs_warmup=True),\n',
                "",
            ),
        ],
        "OVERRIDES = ['optim.schedule=inverse_sqrt']"
        + PLANNED
        + "assert rates[199] < rates[49] / 1.8",
    ),
    "residual_rms": (
        [
            Edit(
                "run/columns.py",
                '"residual_rms_", "internals",',
                '"residual_rms_", "train",',
            ),
            Edit(
                "training/evaluation.py",
                '        columns[f"residual_rms_h.{number}"] = rms\n',
                '        columns[f"residual_h.{number}"] = rms\n',
            ),
        ],
        "OVERRIDES = ['eval.internals=2']" + TRAINED + "assert row['residual_rms_h.0'] > 0\n"
        "assert series_of('residual_rms_h.0') == 'internals/residual_rms_h.0'",
    ),
}
"""Name -> each line outside of its own file that names it, taken out, and code that fails without
one of them."""


IMPORTED_ANEW = """
import sys
sys.dont_write_bytecode = True
OTHERS = ("efftrain_cli", "tests", "typer")
for name in [name for name in sys.modules if name.split(".")[0] in OTHERS]:
    del sys.modules[name]
sys.path.insert(0, ROOT)
exec(CODE, {"__name__": "__main__"})
raise SystemExit
"""
"""Runs CODE with the package at ROOT, in a process that has PyTorch already."""


@dataclass
class Copy:
    """A copy of the package and its tests."""

    root: Path
    zygote: Zygote

    def run(self, code: str, changes: Sequence[Edit] = ()) -> Process:
        """Run code with changes, which are undone afterwards."""
        before: dict[Path, str] = {}
        for file, old, new in changes:
            path = self.root / "efftrain_cli" / file
            text = path.read_text() if old else ""
            assert not old or text.count(old) == 1, f"{file}: {old}"
            before.setdefault(path, text)
            path.write_text(text.replace(old, new) if old else new)
        inject = f"ROOT, CODE = {str(self.root)!r}, {code!r}\n{IMPORTED_ANEW}"
        files = {"out": self.root / "out", "err": self.root / "err"}
        process = self.zygote.start(cwd=self.root, inject=inject, **files)
        process.wait(120)
        for path, text in before.items():
            if text:
                path.write_text(text)
            else:
                path.unlink()
        return process


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> Copy:
    root = tmp_path_factory.mktemp("copy")
    for folder in ("efftrain_cli", "recipes", "tests"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / folder, root / folder, ignore=ignored)
    return Copy(root, zygote)


@pytest.mark.parametrize("what", ADDITIONS)
def test_an_addition_takes_the_files_of_its_row(copy, what):
    changes, code = ADDITIONS[what]
    (row,) = re.findall(rf"^\| [^|]*\b{what}\b[^|]*\|(.*?)\|", TABLE, re.M)
    for file, old, _ in changes:
        assert f"`{file}`" in row or (not old and f"`{Path(file).parent}`" in row), file
    done = copy.run(code, changes)
    assert done.code == 0, done.said()[-2000:]


(EXAMPLE,) = re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE, re.DOTALL)
(DIFF,) = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
METHOD = """
import pytest
from efftrain_cli.foundation.errors import RecipeError
from tests.resume_law import assert_resumes_exactly, run
from tests.tiny import fresh, tiny_recipe

def losses(*overrides):
    recipe = tiny_recipe(*overrides)
    return [row["loss"] for row in run(fresh(recipe), recipe)[1:]]

noisy = "gradient_noise.eta=0.01"
rows = assert_resumes_exactly(tiny_recipe(noisy))
stds = [row["gradient_noise_std"] for row in rows[1:3]]
assert stds == pytest.approx([0.1, 0.1 * 2**-0.275])
assert losses("gradient_noise.eta=0") == losses() != losses(noisy)
with pytest.raises(RecipeError, match="gradient_noise.eta = -1"):
    tiny_recipe("gradient_noise.eta=-1")
"""
"""Checks that the example resumes, changes nothing at zero, and refuses a bad value."""


def test_the_worked_example_is_a_method(copy):
    changes = [Edit(EXAMPLE[0].removeprefix("efftrain_cli/"), "", EXAMPLE[1])]
    for path, lines in re.findall(r"# efftrain_cli/(\S+)\n((?:[+ ].*\n)+)", DIFF):
        added = "".join(re.findall(r"^\+(.*\n)", lines, re.MULTILINE))
        (before,) = re.findall(r"^ (.*\n)", lines, re.MULTILINE)
        changes.append(Edit(path, before, added + before))
    assert DIFF.count("\n+") == 4, "an import, a field, and one question to the method"
    done = copy.run(METHOD, changes)
    assert done.code == 0, done.said()[-2000:]


@pytest.mark.parametrize("name", NEWEST)
def test_every_line_that_names_the_newest_is_needed(copy, name):
    lines, code = NEWEST[name]
    assert len(lines) <= 4
    done = copy.run(code)
    assert done.code == 0, done.said()[-2000:]
    for line in lines:
        assert copy.run(code, [line]).code != 0, line


def test_every_row_is_tried():
    rows = re.findall(r"^\| (an? [a-zA-Z', ]+?) \|", TABLE, re.M)
    assert set(", ".join(rows).split(", ")) == {*ADDITIONS, "an optimizer"}
