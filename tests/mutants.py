"""Measure how many seeded one-line bugs the fast tests catch.

`make mutants SEED=0123abcd` draws lines of the package by the seed, changes each once and runs the
fast tests that execute the line. Use the first 8 digits of the commit under test as the seed, so
that nobody chooses it.

Cosmic Ray says which changes a line allows. Which tests execute a line, and their seconds, are
measured once: a copy of the package notes it at each drawn line, in the processes that the tests
start too. That and each mutant's outcome are kept in .cache/mutants/SEED, and a second call goes on
from there. Two mutants are tried at a time.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from scipy.stats import binomtest

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "efftrain_cli"
HANG = 60
"""Seconds after which one test counts as failing: some mutants loop forever."""
FAST = ("-q", "-p", "no:cacheprovider", "--tb=no", "-m", "not slow and not gpu")
OPERATORS = [
    f"core/{name}"
    for name in (
        *("AddNot", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "NumberReplacer"),
        *("ReplaceAndWithOr", "ReplaceOrWithAnd", "ReplaceUnaryOperator_Delete_Not"),
        *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ZeroIterationForLoop"),
        *("ReplaceBinaryOperator_Add_Sub", "ReplaceBinaryOperator_Sub_Add"),
        *("ReplaceBinaryOperator_Mul_Div", "ReplaceBinaryOperator_Div_Mul"),
        *("ReplaceBinaryOperator_FloorDiv_Mul", "ReplaceUnaryOperator_Delete_USub"),
        *("ReplaceComparisonOperator_Lt_LtE", "ReplaceComparisonOperator_LtE_Lt"),
        *("ReplaceComparisonOperator_Gt_GtE", "ReplaceComparisonOperator_GtE_Gt"),
        *("ReplaceComparisonOperator_Eq_NotEq", "ReplaceComparisonOperator_NotEq_Eq"),
        *("ReplaceComparisonOperator_Is_IsNot", "ReplaceComparisonOperator_IsNot_Is"),
    )
]
INVISIBLE = {
    "strict=": "zip's own check of our lengths: no valid input can show it",
    "*,  ->  /,": "arguments by name alone: a type checker reads it",
    "if TYPE_CHECKING": "names that stand in annotations, which nothing evaluates",
    "dataclass(frozen=": "nothing assigns to instances or hashes them; a type checker reads it",
}
"""Words of changes that nobody can see, and why; others are drawn in their place."""

NOTES = """
import os

seen = set()


def note(number):
    test = os.environ.get("PYTEST_CURRENT_TEST", "import").partition("[")[0].partition(" (")[0]
    if (number, test) not in seen:
        seen.add((number, test))
        with open(FILE, "a") as file:
            file.write(f"{number} {test}\\n")
"""
"""The module of the copy that writes `number of the line, test` to a file. Several processes append
to it: a short line is one write, which the system does not mix with another's."""


@dataclass(frozen=True)
class Mutant:
    """One changed line of one module."""

    module: str
    line: int
    operator: str
    occurrence: int

    def source(self) -> str:
        """Return the changed source of the module."""
        text = (REPOSITORY / self.module).read_text()
        return mutate_code(text, get_operator(self.operator)(), self.occurrence)

    def change(self) -> str:
        """Return `module: before  ->  after`."""
        place = self.module.removeprefix("efftrain_cli/")
        before = (REPOSITORY / self.module).read_text().splitlines()
        for old, new in zip(before, self.source().splitlines(), strict=False):
            if old != new:
                return f"{place}: {old.strip()}  ->  {new.strip()}"
        return f"{place}: {self.operator}"


def mutants_of(module: Path) -> Iterator[Mutant]:
    """Yield every mutant of one module."""
    positions: dict[str, int] = defaultdict(int)
    for node in ast_nodes(get_ast(module.read_text())):
        for name in OPERATORS:
            for (line, _), _ in get_operator(name)().mutation_positions(node):
                yield Mutant(str(module.relative_to(REPOSITORY)), line, name, positions[name])
                positions[name] += 1


def draw(seed: str) -> Iterator[Mutant]:
    """Yield mutants in random order: a line that can be changed, and one change of it.

    Lines are drawn alike, whether a test reaches them or not.
    """
    by_line: dict[tuple[str, int], list[Mutant]] = defaultdict(list)
    for module in sorted(PACKAGE.rglob("*.py")):
        for mutant in mutants_of(module):
            by_line[mutant.module, mutant.line].append(mutant)
    generator = random.Random(int(seed, 16))
    lines = sorted(by_line)
    generator.shuffle(lines)
    for line in lines:
        mutant = generator.choice(by_line[line])
        change = mutant.change()
        if not any(word in change for word in INVISIBLE):
            yield mutant


def noted(source: str, numbers: dict[int, int]) -> str:
    """Return a module's source in which line `l` notes that it runs, as number `numbers[l]`.

    A line outside functions counts as run whenever a function of the module is.
    """
    lines = source.splitlines(keepends=True)
    functions = []
    statements = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.body[0].lineno > node.lineno:
            has_docstring = ast.get_docstring(node) is not None
            functions.append([*node.body, node][has_docstring])
            statements += [child for child in ast.walk(node) if isinstance(child, ast.stmt)][1:]
    for line, number in sorted(numbers.items(), reverse=True):
        around = []
        for statement in statements:
            is_elif = lines[statement.lineno - 1].lstrip().startswith("elif")
            if statement.lineno <= line <= statement.end_lineno and not is_elif:
                around.append(statement)
        chosen = [max(around, key=first_line)] if around else functions
        for statement in chosen:
            place = first_line(statement) - 1
            indent = " " * statement.col_offset
            call = f'__import__("efftrain_cli._notes")._notes.note({number})\n'
            lines[place] = indent + call + lines[place]
    return "".join(lines)


def first_line(statement: ast.stmt) -> int:
    """Return the line on which a statement begins, its decorators included."""
    decorators = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])


@contextmanager
def copied_project() -> Iterator[Path]:
    """Copy what the tests need to a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder, "project")
        left_out = shutil.ignore_patterns(".git", ".venv", ".cache", "runs")
        shutil.copytree(REPOSITORY, project, ignore=left_out)
        (project / "runs").mkdir()
        Path(folder, "shared").symlink_to(REPOSITORY.parent / "shared")
        yield project


def measure_reach(mutants: list[Mutant], folder: Path) -> dict[int, set[str]]:
    """Return the tests (without parameters) that run each mutant's line.

    They are kept in `folder`/reach, and what pytest said, seconds included, in `folder`/pytest.
    """
    file = folder / "reach"
    if not file.exists():
        numbers: dict[str, dict[int, int]] = defaultdict(dict)
        for number, mutant in enumerate(mutants):
            numbers[mutant.module][mutant.line] = number
        with copied_project() as project:
            notes = project.parent / "notes"
            (project / "efftrain_cli" / "_notes.py").write_text(f"FILE = {str(notes)!r}\n" + NOTES)
            for module, lines in numbers.items():
                path = project / module
                path.write_text(noted(path.read_text(), lines))
            options = ["-n2", "--durations=0", "--durations-min=0", f"--timeout={2 * HANG}"]
            command = [sys.executable, "-m", "pytest", *FAST, *options]
            with (folder / "pytest").open("w") as output:
                subprocess.run(command, cwd=project, stdout=output, check=False)
            shutil.copy(notes, file)
    reach: dict[int, set[str]] = defaultdict(set)
    for line in file.read_text().splitlines():
        number, _, test = line.partition(" ")
        if test != "import":
            reach[int(number)].add(test)
    return reach


def seconds_of_tests(output: str) -> dict[str, float]:
    """Return the seconds of each test, over its parameters, from pytest's list of durations."""
    seconds: dict[str, float] = defaultdict(float)
    for duration, test in re.findall(r"^([\d.]+)s \w+ +([^\s[]+)", output, re.M):
        seconds[test] += float(duration)
    return seconds


def in_order(mutant: Mutant, tests: set[str], seconds: dict[str, float]) -> list[str]:
    """Return the tests that run the mutant's line, then the others of their files, whose fixtures
    may run it.

    Tests of a file stand together: they share its fixtures. First come files that are named after
    the module, then those whose tests take the fewest seconds.
    """
    name = Path(mutant.module).stem
    cost: dict[str, float] = defaultdict(float)
    for test in tests:
        cost[file_of(test)] += seconds.get(test, 0.0)

    def key(test: str) -> tuple[bool, bool, float, str]:
        file = file_of(test)
        return test not in tests, name not in file, cost[file], test

    others = {test for test in seconds if file_of(test) in cost}
    return sorted(tests | others, key=key)


def file_of(test: str) -> str:
    return test.partition("::")[0]


def first_failure(project: Path, tests: list[str], limit: float) -> str:
    """Return the first of the tests that fails, or what else came of them within `limit`
    seconds."""
    command = [sys.executable, "-m", "pytest", *FAST, "-x", "-rfE", f"--timeout={HANG}", *tests]
    process = subprocess.Popen(
        command, cwd=project, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return ""
    # The name of a test may hold spaces.
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    if failed:
        return failed[1]
    if process.returncode not in (0, 5):
        return f"exit code {process.returncode}"
    return ""


def try_mutant(mutant: Mutant, tests: list[str], limit: float) -> str:
    """Return which of the tests catches the mutant, or an empty string.

    A test that fails without the mutant, too, is left out.
    """
    unsound: list[str] = []
    with copied_project() as project:
        path = project / mutant.module
        original = path.read_text()
        while tests:
            path.write_text(mutant.source())
            options = [f"--deselect={test}" for test in unsound]
            failed = first_failure(project, [*options, *tests], limit)
            path.write_text(original)
            if not failed or "::" not in failed or not first_failure(project, [failed], 2 * limit):
                return failed
            unsound.append(failed)
    return ""


def main() -> None:
    """Draw mutants, try each, print the survivors and the share that was caught."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", required=True, help="hexadecimal: the commit's first 8 digits")
    parser.add_argument("--lines", type=int, default=60, help="mutants to try (default 60)")
    parser.add_argument("--limit", type=float, default=100, help="seconds a mutant (default 100)")
    options = parser.parse_args()
    folder = REPOSITORY / ".cache" / "mutants" / options.seed
    folder.mkdir(parents=True, exist_ok=True)
    mutants = list(islice(draw(options.seed), options.lines))
    reach = measure_reach(mutants, folder)
    seconds = seconds_of_tests((folder / "pytest").read_text())

    def outcome(number: int) -> str:
        kept = folder / str(number)
        if not kept.exists():
            tests = in_order(mutants[number], reach[number], seconds)
            kept.write_text(try_mutant(mutants[number], tests, options.limit))
        return kept.read_text()

    caught = 0
    with ThreadPoolExecutor(2) as pool:
        outcomes = pool.map(outcome, range(len(mutants)))
        for mutant, failed in zip(mutants, outcomes, strict=True):
            caught += bool(failed)
            word = "caught" if failed else "SURVIVED"
            by = f"\n            by {failed}" if failed else ""
            print(f"{word:8}  line {mutant.line:<4} {mutant.change()}{by}", flush=True)
    interval = binomtest(caught, len(mutants)).proportion_ci(method="wilson")
    share = f"{caught / len(mutants):.0%} [{interval.low:.0%}, {interval.high:.0%}]"
    print(f"{caught} of {len(mutants)} caught: {share}")


if __name__ == "__main__":
    main()
