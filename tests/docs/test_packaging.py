"""What the packaging files promise is what the code does."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

import efftrain_cli
from efftrain_cli.data.corpus import CorpusManifest
from efftrain_cli.run import manifest, origin
from efftrain_cli.zeroshot import results

ROOT = Path(__file__).resolve().parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_one_version_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert PROJECT["version"] == efftrain_cli.__version__ == citation["version"]
    assert f"## {efftrain_cli.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_changelog_names_the_formats_that_are_written():
    table = dict(
        re.findall(r"^\| ([a-z -]+) \| .* \| (\d+) \|$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    )
    written = {
        "run": origin.Origin.newest,
        "checkpoint": manifest.SCHEMA_VERSION,
        "token shards": CorpusManifest.newest,
        "zero-shot scores": results.SCHEMA_VERSION,
    }
    assert {name: int(version) for name, version in table.items()} == written


def test_ci_runs_what_is_run_here_on_every_promised_python():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    jobs = workflow["jobs"]
    versions = jobs["test"]["strategy"]["matrix"]["python"]
    promised = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert versions == promised == ["3.11", "3.12", "3.13", "3.14"]
    commands = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    for script in (".ci/run", ".ci/floors"):
        assert (
            any(script in command for command in commands)
            and (ROOT / script).stat().st_mode & 0o100
        )
    assert "Operating System :: POSIX" in PROJECT["classifiers"]
    assert "licence" in (ROOT / "README.md").read_text()


def test_an_issue_asks_for_the_runs_origin():
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text())
    (origin,) = [part for part in form["body"] if part["id"] == "origin"]
    assert "origin.json" in origin["attributes"]["label"] and origin["validations"]["required"]


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "efftrain_cli" / "py.typed").is_file()


def test_nothing_that_a_user_reads_refers_to_files_outside_the_wheel():
    """Messages, help and recipes; docstrings and comments are for readers of the repository, which
    has these files."""
    import ast

    outside = re.compile(r"\b(docs|benchmarks|tests)/")
    found = []
    for path in sorted((ROOT / "efftrain_cli").rglob("*.py")):
        tree = ast.parse(path.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        found += [
            f"{path.relative_to(ROOT)}:{node.lineno}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docstrings
            and outside.search(node.value)
        ]
    for path in sorted((ROOT / "recipes").glob("*.toml")):
        found += [
            str(path.relative_to(ROOT))
            for line in path.read_text().splitlines()
            if outside.search(line)
        ]
    assert not found, found


def test_the_files_that_other_programs_read_are_whole():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "version", "type"} <= citation.keys()
    assert citation["authors"] and all(
        "name" in author or "family-names" in author for author in citation["authors"]
    )
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    by_id = {hook["id"]: (repo, hook) for repo in hooks["repos"] for hook in repo["hooks"]}
    pinned = re.search(r"^ruff==(.*)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert (
        pinned is not None and by_id["ruff-check"][0]["rev"] == f"v{pinned[1]}"
    )  # the linter of CI
    for word in by_id["rooms"][1]["entry"].split():
        assert not word.endswith(".py") or (ROOT / word).is_file()
    for workflow in (ROOT / ".github" / "workflows").iterdir():
        jobs = yaml.safe_load(workflow.read_text())["jobs"]
        assert all(
            job["runs-on"] and all("uses" in step or "run" in step for step in job["steps"])
            for job in jobs.values()
        )
    for name in re.findall(
        r"`((?:docs|tests|efftrain_cli)/[\w./-]+|[\w-]+\.md|\.ci/\w+)`",
        (ROOT / "CONTRIBUTING.md").read_text(),
    ):
        assert (ROOT / name).exists(), name


def test_what_is_imported_is_declared():
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
    third = {
        name for name in found if name not in sys.stdlib_module_names and name != "efftrain_cli"
    }
    missing = {name for name in third if name.lower() not in names} - {
        "click",
        "markdown_it",
        "pydantic_core",
    }
    assert not missing, missing
