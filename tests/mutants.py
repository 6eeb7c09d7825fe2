"""Measure how many seeded one-line bugs the fast tests catch.

`make mutants SEED=0123abcd` draws lines of the package by the seed, changes each once and runs the
fast test files that reach the line. Use the first 8 digits of the commit under test as the seed, so
that nobody chooses it. Mutants that change nothing a user or a program could see are listed in
EQUIVALENT with a reason, and others are drawn in their place.

Cosmic Ray says which changes a line allows; coverage.py says which test files reach it, in the
processes that the tests start too. What each test file reaches is measured once per commit and kept
in .cache/mutants.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import coverage
from cosmic_ray.ast import get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from scipy.stats import binomtest

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "efftrain_cli"
CACHE = REPOSITORY / ".cache" / "mutants"
LIMIT = 60.0
"""Seconds that the tests of one mutant may take; tests not run by then count as not failing."""
HANG = "20"
"""Seconds after which one test counts as failing: some mutants loop forever."""
FAST = ("-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu")
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
EQUIVALENT: dict[str, str] = {}
"""`module:line text -> changed text` of a mutant that cannot be seen, and why."""


@dataclass(frozen=True)
class Mutant:
    """One changed line of one module."""

    module: str
    line: int
    operator: str
    occurrence: int

    def source(self) -> str:
        """Return the changed source of the module."""
        text = (REPOSITORY / self.module).read_text(encoding="utf-8")
        return mutate_code(text, get_operator(self.operator)(), self.occurrence)

    def change(self) -> str:
        """Return `module:line: before -> after`."""
        before = (REPOSITORY / self.module).read_text(encoding="utf-8").splitlines()
        after = self.source().splitlines()
        for old, new in zip(before, after, strict=False):
            if old != new:
                return f"{self.module}:{self.line}: {old.strip()}  ->  {new.strip()}"
        return f"{self.module}:{self.line}: {self.operator}"


def mutants_of(module: Path) -> Iterator[Mutant]:
    """Yield every mutant of one module."""
    tree = get_ast(module.read_text(encoding="utf-8"))
    nodes = [tree]
    positions: dict[str, int] = defaultdict(int)
    while nodes:
        node = nodes.pop(0)
        nodes[:0] = getattr(node, "children", [])
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
        yield generator.choice(by_line[line])


def measure_reach(commit: str) -> dict[tuple[str, int], set[str]]:
    """Return the test files that reach each line of the package, (module, line) -> files."""
    folder = CACHE / commit
    files = sorted((REPOSITORY / "tests").rglob("test_*.py"))
    for number, file in enumerate(files):
        name = str(file.relative_to(REPOSITORY))
        data = folder / name.replace("/", "-")
        if not data.exists():
            print(
                f"\rwhat tests reach: {number + 1} of {len(files)}  {name:60}", end="", flush=True
            )
            run_with_coverage(name, data)
    reach: dict[tuple[str, int], set[str]] = defaultdict(set)
    for file in files:
        name = str(file.relative_to(REPOSITORY))
        data = coverage.CoverageData(str(folder / name.replace("/", "-")))
        data.read()
        for module in data.measured_files():
            for line in data.lines(module) or ():
                reach[str(Path(module).relative_to(REPOSITORY)), line].add(name)
    return reach


def run_with_coverage(test_file: str, data: Path) -> None:
    """Run the fast tests of one file and write which lines of the package they execute."""
    data.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "coveragerc"
        settings.write_text(
            "[run]\nparallel = true\npatch = subprocess, fork, _exit\n"
            f"source = {PACKAGE}\ndata_file = {folder}/data\n"
        )
        command = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", "-m", "pytest"]
        subprocess.run([*command, *FAST, test_file], cwd=REPOSITORY, check=False)
        combine = [sys.executable, "-m", "coverage", "combine", f"--rcfile={settings}", "-q"]
        subprocess.run(combine, cwd=REPOSITORY, check=False)
        shutil.copy(Path(folder) / "data", data)


def order(tests: set[str], mutant: Mutant, reach: dict[tuple[str, int], set[str]]) -> list[str]:
    """Return the test files: those of the module's name first, then those that reach least."""
    reached_lines: dict[str, int] = defaultdict(int)
    for files in reach.values():
        for file in files:
            reached_lines[file] += 1
    name = Path(mutant.module).stem
    return sorted(tests, key=lambda test: (name not in Path(test).stem, reached_lines[test], test))


def is_caught(mutant: Mutant, tests: list[str]) -> bool:
    """Return whether a test fails within LIMIT on a copy of the project with the mutant."""
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder) / "project"
        left_out = shutil.ignore_patterns(".git", ".venv", ".cache", "runs", "__pycache__")
        shutil.copytree(REPOSITORY, project, ignore=left_out)
        (project / "runs").mkdir()
        if (REPOSITORY.parent / "shared").exists():
            (Path(folder) / "shared").symlink_to(REPOSITORY.parent / "shared")
        (project / mutant.module).write_text(mutant.source(), encoding="utf-8")
        try:
            command = [sys.executable, "-m", "pytest", *FAST, "-x", f"--timeout={HANG}", *tests]
            done = subprocess.run(command, cwd=project, timeout=LIMIT, capture_output=True)
        except subprocess.TimeoutExpired:
            return False
        return done.returncode != 0


def main() -> None:
    """Draw mutants, try each, print the survivors and the share that was caught."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", required=True, help="hexadecimal: the commit's first 8 digits")
    parser.add_argument("--lines", type=int, default=60, help="mutants to try (default 60)")
    options = parser.parse_args()
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, text=True)
    reach = measure_reach(commit.strip())
    caught = 0
    tried = 0
    for mutant in draw(options.seed):
        if tried == options.lines:
            break
        change = mutant.change()
        if "strict=True" in change:  # zip's own check of our lengths: no valid input can show it
            continue
        if change in EQUIVALENT:
            print(f"equivalent  {change}  ({EQUIVALENT[change]})")
            continue
        tests = order(reach.get((mutant.module, mutant.line), set()), mutant, reach)
        found = bool(tests) and is_caught(mutant, tests)
        tried += 1
        caught += found
        print(f"{'caught' if found else 'SURVIVED':10}  {change}", flush=True)
    interval = binomtest(caught, tried).proportion_ci(method="wilson")
    print(
        f"{caught} of {tried} caught: {caught / tried:.0%} [{interval.low:.0%}, {interval.high:.0%}]"
    )


if __name__ == "__main__":
    main()
