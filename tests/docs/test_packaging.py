"""What the packaging files promise is what the code does."""

from __future__ import annotations

import ast
import re
import sys
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
    assert (ROOT / "efftrain_cli" / "py.typed").is_file()


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
        assert any(script in command for command in commands)
        assert (ROOT / script).stat().st_mode & 0o100


def test_nothing_that_a_user_reads_refers_to_files_outside_the_wheel():
    """Messages, help and recipes; docstrings and comments are for readers of the repository, which
    has these files."""
    outside = re.compile(r"\b(docs|benchmarks|tests)/")
    found = []
    for path in sorted((ROOT / "efftrain_cli").rglob("*.py")):
        if not outside.search(path.read_text()):
            continue
        tree = ast.parse(path.read_text())
        docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            is_text = isinstance(node, ast.Constant) and node not in docstrings
            if is_text and outside.search(str(node.value)):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    for path in sorted((ROOT / "recipes").glob("*.toml")):
        if outside.search(path.read_text()):
            found.append(path.name)
    assert not found, found


def test_what_is_imported_is_declared():
    """Every distribution that the package imports anywhere is named in pyproject.toml."""
    optional = PROJECT["optional-dependencies"]
    declared = PROJECT["dependencies"] + optional["eval"] + optional["tensorboard"]
    names = {re.match(r"[\w-]+", name)[0].replace("-", "_").lower() for name in declared}
    line = re.compile(r"^ *(?:from|import) (\w+)[\w.]*(?: import .*| as \w+)?$", re.MULTILINE)
    found = set()
    for path in (ROOT / "efftrain_cli").rglob("*.py"):
        found |= {*line.findall(path.read_text())}
    third = {name.lower() for name in found - sys.stdlib_module_names - {"efftrain_cli"}}
    through_others = {"click", "markdown_it", "pydantic_core"}
    assert third - names - through_others == set()
