"""What the program may import, and which module may import which.

Floors: the command line answers at once because help, recipes and completion import nothing heavy;
and recipes load where torch and numpy cannot be imported at all. Layers: imports point down only,
so that every module can be read knowing only what lies below it.
"""

from __future__ import annotations

import ast
import re
import resource
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, python

PACKAGE = REPOSITORY / "efftrain_cli"
HEAVY = ("torch", "datasets", "transformers", "wandb", "pandas", "matplotlib")


# --- floors ---------------------------------------------------------------------------------------

ANSWERS = f"""
import contextlib, io, os, sys
from efftrain_cli.cli.commands import register
register()
from efftrain_cli.cli.app import app

def answer(*args):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        app(list(args), prog_name="efftrain")
    found = sorted(set({HEAVY!r}) & sys.modules.keys())
    assert not found, f"efftrain {{' '.join(args)}} imports {{found}}"
    assert out.getvalue().strip(), f"efftrain {{' '.join(args)}} printed nothing"

answer("--help")
answer("recipes", "list")
answer("recipes", "show", "gpt2-117m")
answer("recipes", "diff", "gpt2-117m", "small")
names = [c.name or c.callback.__name__.replace("_", "-") for c in app.registered_commands]
assert names, "no command is registered"
for name in names:
    answer(name, "--help")
for group in app.registered_groups:
    answer(group.name, "--help")
os.environ["_EFFTRAIN_COMPLETE"] = "complete_bash"
for words in ("efftrain recipes show gp", "efftrain recipes show --set optim."):
    os.environ.update(COMP_WORDS=words, COMP_CWORD=str(len(words.split()) - 1))
    answer()
print("answered", *names)
"""


def test_help_and_recipes_import_nothing_heavy(tmp_path):
    assert python(ANSWERS, cwd=tmp_path).stdout.startswith("answered")


def test_a_command_is_registered_by_its_own_module_alone(tmp_path):
    """What `register` is told to import is enough for the command, and all of them are what
    `efftrain --help` shows."""
    code = f"""
import sys
from efftrain_cli.cli.app import app
from efftrain_cli.cli.commands import COMMANDS, register

def names():
    commands = [c.name or c.callback.__name__.replace("_", "-") for c in app.registered_commands]
    return commands + [g.name for g in app.registered_groups]

for number, command in enumerate(COMMANDS, 1):
    register(command)
    assert command in names() and len(names()) == number, (command, names())
assert sys.modules.keys().isdisjoint({HEAVY!r})
"""
    python(code, cwd=tmp_path)


def processor_seconds(code: str, cwd: Path) -> float:
    """Return the processor time of a new process that runs `code`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    python(code, cwd=cwd)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def test_help_answers_quickly(tmp_path):
    """Help takes less than twice the CPU time of importing the libraries that draw and check it:
    0.3 s when idle. One of five tries is enough: machines are slow for a while."""
    libraries = "import typer, typer.rich_utils, pydantic.dataclasses"
    most = 2 * min(processor_seconds(libraries, tmp_path) for _ in range(2))
    code = "import sys; sys.argv[1:] = ['--help']\nimport efftrain_cli.__main__ as m; m.main()"
    assert any(processor_seconds(code, tmp_path) < most for _ in range(5))


def test_recipes_load_and_plan_without_torch_and_numpy(tmp_path):
    code = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numpy"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
from efftrain_cli.plan.plan import plan_step
from efftrain_cli.recipe.rules import warnings_of
from efftrain_cli.recipe.draft import recipe_names
from efftrain_cli.recipe.recipe import dump_recipe, load_recipe
from efftrain_cli.foundation.step import Progress
for name in recipe_names():
    recipe = load_recipe(name)
    assert plan_step(recipe, Progress()).step == 1
    dump_recipe(recipe), warnings_of(recipe)
print(len(recipe_names()))
"""
    done = python(code, cwd=tmp_path)
    assert int(done.stdout) == len(list((REPOSITORY / "recipes").glob("*.toml")))


# --- layers ---------------------------------------------------------------------------------------

PICTURE = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
# The rooms, from the bottom up: a module may import what stands on its own line of the picture or
# below. Everything else at the top of the package is a command: a file, or a folder where it needs
# several. The command line stands above all.
ROOMS = re.findall(r"^    (\w+)/ ", PICTURE, re.MULTILINE)[:0:-1]
COMMANDS = len(ROOMS)
CLI = COMMANDS + 1


@cache
def module_names() -> list[str]:
    paths = [path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py")]
    return sorted(
        ".".join(path.parts).removesuffix(".__init__")
        for path in paths
        if path.name != "__init__" or path.parent.name
    )


def is_cli(module: str) -> bool:
    return module.split(".")[0] in ("cli", "__main__")


def floor_of(module: str) -> int:
    top = module.split(".")[0]
    if is_cli(module):
        return CLI
    return ROOMS.index(top) if top in ROOMS else COMMANDS


@cache
def imports_of(module: str) -> list[tuple[str, int]]:
    """(module of ours, line) of every import, those inside functions and for type checkers
    included."""
    path = PACKAGE / Path(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                is_module = name.removeprefix("efftrain_cli.") in module_names()
                names.append(name if is_module else str(node.module))
        for name in names:
            if name.startswith("efftrain_cli."):
                found.append((name.removeprefix("efftrain_cli."), node.lineno))
    return found


def test_the_picture_has_every_file_and_folder_at_the_top():
    (commands,) = re.findall(r"^    commands (.*?)^    trials/", PICTURE, re.MULTILINE | re.DOTALL)
    names = {name.removesuffix("/") for name in commands.split()}
    tops = {module.split(".")[0] for module in module_names()}
    assert tops == {*names, *ROOMS, "cli", "__main__"}


def test_imports_point_down():
    wrong = {
        f"{module}.py:{line} imports {imported}"
        for module in module_names()
        for imported, line in imports_of(module)
        if floor_of(imported) > floor_of(module)
    }
    assert not wrong, "these imports point up:\n" + "\n".join(sorted(wrong))


MOST_FILES = {"cli": 24, "training": 24}
"""Files of the packages that may have more than twelve."""


def test_packages_have_few_files_and_files_few_lines():
    for package in sorted({path.parent for path in PACKAGE.glob("*/*.py")}):
        files = [path for path in package.glob("*.py") if path.name != "__init__.py"]
        assert len(files) <= MOST_FILES.get(package.name, 12), package.name
    for path in PACKAGE.rglob("*.py"):
        lines = len(path.read_text("utf-8").splitlines())
        assert lines <= 400, (path, lines)


@pytest.mark.parametrize("depth", [1, 3], ids=["rooms", "files"])
def test_imports_make_no_circle(depth):
    graph: dict[str, set[str]] = {}
    for module in module_names():
        here = ".".join(module.split(".")[:depth])
        there = {".".join(name.split(".")[:depth]) for name, _ in imports_of(module)}
        graph.setdefault(here, set()).update(there - {here})
    TopologicalSorter(graph).prepare()  # raises CycleError with the circle


def test_only_the_command_line_knows_typer():
    uses = re.compile(r"^\s*(import|from) typer\b", re.MULTILINE)
    users = [path for path in PACKAGE.rglob("*.py") if uses.search(path.read_text("utf-8"))]
    assert {path.parent.name for path in users} == {"cli"}
