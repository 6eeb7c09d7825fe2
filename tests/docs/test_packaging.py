"""What the packaging files promise is what the code does."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

import efftrain_cli
from efftrain_cli.data import shards
from efftrain_cli.run import manifest, rows
from efftrain_cli.zeroshot import results

ROOT = Path(__file__).resolve().parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_one_version_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert PROJECT["version"] == efftrain_cli.__version__ == citation["version"]
    assert f"## {efftrain_cli.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_changelog_names_the_formats_that_are_written() -> None:
    table = dict(re.findall(r"^\| ([a-z -]+) \| .* \| (\d+) \|$", (ROOT / "CHANGELOG.md").read_text(), re.M))
    written = {
        "run": rows.SCHEMA_VERSION, "checkpoint": manifest.SCHEMA_VERSION, "token shards": shards.SCHEMA_VERSION,
        "zero-shot scores": results.SCHEMA_VERSION,
    }  # fmt: skip
    assert {name: int(version) for name, version in table.items()} == written


def test_ci_runs_what_is_run_here_on_every_promised_python() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    jobs = workflow["jobs"]
    versions = jobs["test"]["strategy"]["matrix"]["python"]
    promised = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert versions == promised == ["3.11", "3.12", "3.13"]
    commands = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    for script in (".ci/run", ".ci/floors"):
        assert any(script in command for command in commands) and (ROOT / script).stat().st_mode & 0o100
    assert "Operating System :: POSIX" in PROJECT["classifiers"]
    assert "POSIX" in (ROOT / "README.md").read_text() and "licence" in (ROOT / "README.md").read_text()


def test_an_issue_asks_for_the_runs_origin() -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text())
    (origin,) = [part for part in form["body"] if part["id"] == "origin"]
    assert "origin.json" in origin["attributes"]["label"] and origin["validations"]["required"]


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "efftrain_cli" / "py.typed").is_file()


def test_what_is_imported_is_declared() -> None:
    """Every distribution that the package imports anywhere is named in pyproject.toml."""
    import ast
    import sys

    optional = PROJECT["optional-dependencies"]
    declared = PROJECT["dependencies"] + optional["eval"] + optional["tensorboard"]
    names = {re.match(r"[\w-]+", name)[0].replace("-", "_").lower() for name in declared}
    found = set()
    for path in (ROOT / "efftrain_cli").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                found.add(node.module.partition(".")[0])
    third = {name for name in found if name not in sys.stdlib_module_names and name != "efftrain_cli"}
    missing = {name for name in third if name.lower() not in names} - {"click", "markdown_it", "pydantic_core"}
    assert not missing, missing
