"""Adding a method: the worked example of docs/architecture.md, done to a copy of the package,
trains and resumes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.fake_runs import read_jsonl
from tests.launch import BASELINE, made_text

PAGE = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
(FILE,) = re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE, re.S)
(DIFF,) = re.findall(r"```diff\n(.*?)```", PAGE, re.S)
SECTION = "\n[gradient_noise]\neta = {eta}\n"


def test_every_named_file_exists():
    named = re.findall(r"`((?:[\w]+/)+[\w]+\.py)`", PAGE)
    assert len(named) > 15
    for name in named:
        assert any(
            (folder / name).is_file()
            for folder in (REPOSITORY, REPOSITORY / "efftrain_cli", REPOSITORY / "tests")
        ) or (name == "methods/gradient_noise.py"), name


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with the example's method in it."""
    root = tmp_path_factory.mktemp("extended")
    shutil.copytree(
        REPOSITORY / "efftrain_cli",
        root / "efftrain_cli",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    shutil.copytree(REPOSITORY / "recipes", root / "recipes")
    (root / FILE[0]).write_text(FILE[1])
    lines = 0
    for path, change in re.findall(r"# (\S+)\n((?:[+ ].*\n)+)", DIFF):
        added = "".join(f"{line[1:]}\n" for line in change.splitlines() if line.startswith("+"))
        (before,) = (line[1:] for line in change.splitlines() if line.startswith(" "))
        text = (root / path).read_text()
        assert text.count(f"{before}\n") == 1, f"{path}: {before!r}"
        (root / path).write_text(text.replace(f"{before}\n", f"{added}{before}\n"))
        lines += added.count("\n")
    assert lines == 4, "an import, a field, and one question to the method"
    (root / "text.txt").write_text(made_text())
    return root


def efftrain(root: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "efftrain_cli", *args],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "EFFTRAIN_RUNS": str(root / "runs")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def rows(root: Path, name: str) -> list[dict[str, object]]:
    return read_jsonl(root / "runs" / name / "metrics.jsonl")


@pytest.mark.slow
def test_the_example_trains_resumes_and_is_neutral_at_zero(extended):
    base = BASELINE.replace("TEXT", "text.txt").replace("tokens = 2560", "tokens = 1024")
    for name, eta in (("noisy", "0.01"), ("zero", "0.0"), ("wrong", "-1.0")):
        (extended / f"{name}.toml").write_text(base + SECTION.format(eta=eta))
    (extended / "none.toml").write_text(base)
    for name in ("noisy", "zero", "none"):
        done = efftrain(
            extended, "pretrain", "--recipe", f"{name}.toml", "--name", name, "--no-probe"
        )
        assert done.returncode == 0, done.stderr
    losses = {
        name: [row.get("loss") for row in rows(extended, name)]
        for name in ("noisy", "zero", "none")
    }
    assert losses["zero"] == losses["none"] != losses["noisy"]
    assert [row["gradient_noise_std"] for row in rows(extended, "noisy")[1:3]] == pytest.approx(
        [0.1, 0.1 * 2**-0.275]
    )

    verified = efftrain(extended, "verify-resume", "--recipe", "noisy.toml")
    assert verified.returncode == 0, verified.stderr

    refused = efftrain(extended, "pretrain", "--recipe", "wrong.toml")
    assert refused.returncode == 2
    assert (
        "gradient_noise.eta = -1.0" in refused.stderr and "Variance of the noise" in refused.stderr
    )
