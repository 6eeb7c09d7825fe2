"""`efftrain compare` as it is typed: formats, exit codes, widths, files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner, Result

from efftrain_cli.cli.app import app
from efftrain_cli.foundation.errors import UsageError
from tests.fake_runs import write_run

SLW = "\n[seq_len_warmup]\nstart = 8\nsteps = 10\n"


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two recipes of three seeds; the folder of runs."""
    root = tmp_path / "runs"
    monkeypatch.setenv("EFFTRAIN_RUNS", str(root))
    monkeypatch.chdir(tmp_path)
    for seed in range(3):
        write_run(root, "small", seed)
        write_run(root, "small-slw", seed, speed=1.3, more=SLW)
    return root


def run(*words: str) -> Result:
    """The command in this process; a refusal is raised as it is."""
    result = CliRunner().invoke(app, ["compare", *words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_table_in_a_pipe_folds_nothing(two: Path) -> None:
    out = run("small", "small-slw").stdout
    assert "\x1b" not in out
    row = next(line for line in out.splitlines() if line.startswith("tokens to target"))
    assert re.fullmatch(r"tokens to target +small-slw +1\.30x \[1\.\d\d, 1\.\d\d\] +\S+ +3 +less needed *", row)


def test_formats_agree(two: Path) -> None:
    value = json.loads(run("small", "small-slw", "--format", "json").stdout)
    out = run("small", "small-slw", "--format", "csv", "-o", "c.csv")
    assert out.stdout == ""
    table = pd.read_csv("c.csv").set_index(["measure", "recipe"])
    assert table.loc[("best_loss", "small-slw"), "mean"] == value["groups"][1]["mean"]["best_loss"]
    difference = next(d for d in value["differences"] if d["measure"] == "tokens_to_target")
    assert table.loc[("tokens_to_target", "small-slw"), "difference"] == difference["estimate"]
    loss = f"{value['groups'][1]['mean']['best_loss']:.4f}"
    for kind in ("table", "markdown", "latex"):
        assert loss in run("small", "small-slw", "--format", kind).stdout


def test_latex_escapes(two: Path) -> None:
    out = run("small", "small-slw", "--format", "latex").stdout
    assert r"seq\_len\_warmup.start" in out and r"95 \%" in out and "±" not in out


def test_report_is_one_small_file_without_network(two: Path) -> None:
    # Whatever a run says of itself is text, never markup.
    origin = json.loads((two / "small-seed0" / "origin.json").read_text()) | {"platform": "<script>alert(1)</script><img>"}
    (two / "small-seed0" / "origin.json").write_text(json.dumps(origin))
    run("small", "small-slw", "--format", "html")
    page = Path("report.html").read_text()
    assert len(page.encode()) < 2_000_000
    assert not re.search(r"<script|<link|<img|@import|url\((?!#)|(?:src|href)=\"(?!#)", page)
    assert set(re.findall(r"https?://[^\s\"<)]+", page)) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "prefers-color-scheme: dark" in page and 'name="viewport"' in page
    assert page.count("<svg") == 8 and "currentColor" in page and "#010203" not in page
    run("small", "small-slw", "--format", "html", "-o", "again.html")
    assert Path("again.html").read_text() == page
    for word in ("&lt;script&gt;", "small-slw-seed2", "seq_len_warmup.start = 8", "torch: 2.13.0+cpu", "nats/token", "validation loss"):
        assert word in page


def test_figures_are_written(two: Path) -> None:
    run("small", "small-slw", "--figures", "f")
    names = {path.name for path in Path("f").iterdir()}
    assert {"loss-tokens.svg", "loss-flops.png", "loss-seconds.svg", "seq-len.png", "lr.svg", "loss-ratio.png"} <= names


def test_terminal_plot(two: Path) -> None:
    out = run("small", "small-slw", "--plot").stdout
    assert out.count("validation loss (nats/token)") == 3
    for axis in ("tokens trained", "FLOPs executed", "training time (s)"):
        assert axis in out
    assert "\x1b" not in out


def test_plan(two: Path) -> None:
    out = run("small", "small-slw", "--plan", "--difference", "0.03").stdout
    assert "0.03" in out and "power 80 %" in out
    with pytest.raises(UsageError, match="two recipes"):
        run("small", "--plan")
    with pytest.raises(UsageError, match="above 0"):
        run("small", "small-slw", "--difference", "-1")


def test_price_and_power(two: Path) -> None:
    out = run("small", "small-slw", "--price-per-hour", "3", "--power-watts", "300").stdout
    assert "price at 3 per hour" in out and "energy at 300 W, kWh" in out


def test_refusals_exit_with_2_and_one_message(
    efftrain: Callable[..., subprocess.CompletedProcess[str]], two: Path
) -> None:
    """F49. The fixture's own folder of runs is the same one."""
    write_run(two, "odd", 0, data={"valid_hash": "e" * 64}, lr=5e-3)
    refused = efftrain("compare", "small", "odd")
    assert refused.returncode == 2 and refused.stdout == ""
    assert refused.stderr.startswith("error: these runs cannot be compared fairly")
    assert "Traceback" not in refused.stderr
    allowed = efftrain("compare", "small", "odd", "--allow")
    assert allowed.returncode == 0 and "NOT COMPARABLE: the validation text differs" in allowed.stdout
    assert efftrain("compare", "nothing").returncode == 2
    assert efftrain("compare", "small", "-o", "no/such/folder").returncode == 2


def test_a_reader_that_leaves_is_no_failure(two: Path) -> None:
    """F42."""
    script = f"{sys.executable} -m efftrain_cli compare small small-slw | head -1; exit ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent)}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Baseline: small\n", "")


def test_newer_format_is_refused(two: Path) -> None:
    """F52."""
    write_run(two, "newer", 0, origin={"schema_version": 99})
    with pytest.raises(Exception, match="newer efftrain"):
        run("newer")


def test_registering_the_command_imports_nothing_heavy() -> None:
    code = "import sys; from efftrain_cli.cli.commands import register; register(); bad = {'torch', 'pandas', 'matplotlib', 'scipy', 'wandb', 'pyarrow'}"
    script = f"{code} & set(sys.modules); assert not bad, bad"
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent)})
    assert done.returncode == 0


def test_narrow_terminal_folds_into_blocks(two: Path) -> None:
    from io import StringIO

    from rich.console import Console

    from efftrain_cli.compare.comparison import compare, read_all
    from efftrain_cli.compare.formats import print_tables
    from efftrain_cli.compare.groups import select_runs
    from efftrain_cli.compare.tables import tables_of

    out = StringIO()
    console = Console(file=out, width=40, force_terminal=True, no_color=True, highlight=False)
    print_tables(console, tables_of(compare(read_all(select_runs(["small", "small-slw"])))))
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in out.getvalue().splitlines()]
    assert max(map(len, lines)) <= 40
    at = lines.index("best, nats/token")
    assert lines[at + 1].startswith("  small (3 seeds) 3.2") and lines[at + 2].startswith("  small-slw (3 seeds) 3.1")
