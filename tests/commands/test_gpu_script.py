"""benchmarks/gpu works: the script that measures on a GPU, run on a CPU with tiny shapes, in the
calls that its users make."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import command
from benchmarks.gpu.correctness import LIMITS
from benchmarks.gpu.measuring import check_gradients, relative, worst_gradient
from efftrain_cli.recipe.recipe import load_recipe
from tests.conftest import REPOSITORY, python
from tests.tiny import drawn, fresh

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
CALLS = (
    ("device", "speed", "reference", "correctness"),
    ("largest", "lengths", "resume"),
    ("levers", "methods"),
    ("evidence", "pair"),
)
HEADLINES = 3
"""Calls that fit into thirty minutes."""


def gpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "gpu"), *arguments]
    return subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, timeout=1000, check=False
    )


def pieces_of(folder: Path) -> dict[str, dict[str, dict[str, object]]]:
    return json.loads((folder / "gpu.json").read_text())["pieces"]


@pytest.mark.slow
def test_four_calls_measure_everything_and_a_fifth_prints_the_page(tmp_path):
    earlier: list[str] = []
    for number, call in enumerate(CALLS):
        folder = tmp_path / str(number)  # as on a machine that keeps nothing of the last call
        done = gpu(*call, "--smoke", "--out", str(folder), *earlier)
        assert done.returncode == 0, done.stdout + done.stderr
        earlier = ["--earlier", str(folder / "gpu.json")]
    pieces = pieces_of(folder)
    assert tuple(pieces) == tuple(piece for call in CALLS for piece in call), (
        "earlier results are carried in"
    )
    for piece, parts in pieces.items():
        for part, record in parts.items():
            assert record["status"] == "ok" and record["figures"], (piece, part, record)
            wrong = [figure for figure in record["figures"] if "WRONG" in figure["note"]]  # type: ignore
            assert not wrong, (piece, part, wrong)
    assert "tensors that a skipped step changes" in str(pieces["correctness"])
    checked = [
        figure["name"]
        for record in pieces["correctness"].values()
        for figure in record["figures"]  # type: ignore
    ]
    for shape in ("2 x 32", "1 x 24", "4 x 4"):
        assert f"bf16 compiled whole, bf16 residual, {shape}: gradients" in checked
        assert f"fp32 compiled blocks, {shape}: gradients" in checked

    table = gpu("table", "--out", str(folder))
    assert table.returncode == 0 and "no figure means anything" in table.stdout, table.stderr
    row = next(line for line in table.stdout.splitlines() if "whole step as shipped" in line)
    assert "tokens/s" in row and "| 575,000 |" in row
    assert "device idle | unmeasured" in table.stdout, "a CPU has no such figure"

    before = (folder / "gpu.json").read_bytes()
    again = gpu("device", "speed", "--smoke", "--out", str(folder))
    assert again.returncode == 0 and "stability measures" in again.stdout
    assert json.loads((folder / "gpu.json").read_text()) == json.loads(before), (
        "what is measured is not measured again"
    )


def stand_in(folder: Path, part: str, work: str, options: str = "'--smoke'") -> str:
    """Python code that measures two parts: "whole", and the one that `part` defines with `work`."""
    return f"""
import sys, time
sys.path[:0] = [{str(REPOSITORY)!r}]
import torch
from benchmarks.gpu import command
from benchmarks.gpu.measuring import Part, figure
{work}
{part}
whole = Part("whole", lambda bench: iter([figure("all", 2.0)]), 1)
command.PIECES["device"] = (part, whole)
if "--until" not in sys.argv:
    sys.argv = [sys.argv[0], "device", "--out", {str(folder)!r}, {options}]
command.main("")
"""


@pytest.mark.slow
def test_what_a_part_measured_before_it_failed_is_kept_and_it_alone_runs_again(tmp_path):
    code = stand_in(
        tmp_path,
        "part = Part('half', half, 1)",
        """
def half(bench):
    yield figure("the first half", 1.0)
    raise RuntimeError("then it broke")
""",
    )
    for _ in range(2):
        done = python(code, code=1)
        assert "then it broke" in done.stdout
        parts = pieces_of(tmp_path)["device"]
        assert parts["whole"]["status"] == "ok" and parts["half"]["status"] == "failed"
        assert [figure["name"] for figure in parts["half"]["figures"]] == ["the first half"]  # type: ignore
    assert "device, half: failed" in done.stdout
    assert "device, whole: ok, 0 s\n\n" not in done.stdout, "it is not measured again"


PRETENDED = """
torch.cuda.is_available = lambda: True
torch.cuda.get_device_name = lambda: "a pretended device"
"""
"""Lets seconds count, as they do not in a smoke run; no part that follows touches the device."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "last, message",
    [
        ("time.sleep(60)", "stopped after its 2 s"),
        # A call into a library that returns to Python for no signal.
        (
            (
                "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM]);"
                " time.sleep(60)"
            ),
            "did not end within 1 s of its 2 s",
        ),
    ],
    ids=["python", "library"],
)
def test_a_part_is_stopped_after_its_seconds_and_the_rest_still_runs(tmp_path, last, message):
    work = f"""{PRETENDED}
command.GRACE = 1.0
def long(bench):
    yield figure("before its time was over", 1.0)
    {last}
    yield figure("afterwards", 1.0)
"""
    script = tmp_path / "script.py"
    script.write_text(stand_in(tmp_path, "part = Part('long', long, 2)", work, "*sys.argv[1:]"))
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(script)], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    parts = pieces_of(tmp_path)["device"]
    assert parts["long"]["status"] == "stopped" and message in str(parts["long"]["error"])
    assert [figure["name"] for figure in parts["long"]["figures"]] == ["before its time was over"]  # type: ignore
    assert parts["whole"]["status"] == "ok", done.stdout + done.stderr
    assert done.returncode == 1 and time.monotonic() - began < 50


def test_a_part_without_time_left_is_not_begun_and_named(tmp_path):
    work = PRETENDED + "def long(bench):\n    yield figure('never', 1.0)\n"
    code = stand_in(tmp_path, "part = Part('long', long, 20)", work, "'--budget', '10'")
    done = python(code, code=1)
    assert "no time left for: device, long. Run the same command again" in done.stdout
    assert list(pieces_of(tmp_path)["device"]) == ["whole"]


def test_declared_seconds_fit_into_calls_of_nine_minutes_and_thirty_in_all():
    totals = [
        sum(part.seconds for piece in call for part in command.PIECES[piece]) for call in CALLS
    ]
    assert max(totals) <= command.BUDGET <= 9 * 60 - 2 * command.GRACE
    assert sum(totals[:HEADLINES]) <= 30 * 60 - 4 * 60, "four minutes are for starting the machine"
    parts = [part for piece in command.PIECES.values() for part in piece]
    assert all(part.seconds > 0 for part in parts)


def test_the_calls_are_those_of_the_help_and_the_page():
    page = (REPOSITORY / "docs" / "performance.md").read_text(encoding="utf-8")
    for call in CALLS:
        assert f"python benchmarks/gpu {' '.join(call)}" in page
    shown = gpu("--help").stdout
    assert all(f"python benchmarks/gpu {' '.join(call)}" in shown for call in CALLS)


@pytest.mark.parametrize("lost", ["h.1.ln_1.bias", "h.0.attn.c_attn.bias", "ln_f.weight"])
def test_a_lost_gradient_of_one_parameter_is_seen(lost):
    """Its share of the norm of all gradients is below any limit that bf16 allows."""
    recipe = load_recipe("small", ["model.n_layer=2", "data.tokenizer=bpe:512"])
    model = fresh(recipe, 512).model
    tokens = drawn(512, 2, 32, seed=1)
    (model.loss_sum(tokens, tokens) / 64).backward()
    want = {name: p.grad for name, p in model.named_parameters()}
    assert check_gradients("all", dict(want), want, 0.0)["note"].startswith("ok")  # type: ignore
    for wrong in (None, torch.zeros_like(want[lost]), 0.5 * want[lost]):
        got = want | {lost: wrong}
        together = relative(
            [torch.zeros_like(want[n]) if g is None else g for n, g in got.items()],
            list(want.values()),
        )
        assert lost != "h.1.ln_1.bias" or together < 2e-2, "unseen until now"
        found = check_gradients("all", got, want, LIMITS["bf16"])
        assert found["note"].startswith("WRONG") and found["note"].endswith(lost)  # type: ignore
    assert worst_gradient({"a": torch.ones(2)}, {"a": torch.zeros(2)}) == ("a", float("inf"))
    assert worst_gradient({"a": None}, {"a": None}) == ("a", 0.0)


def test_wheels_are_installed_for_the_call_alone(tmp_path):
    wheel = tmp_path / "wheels" / "carried-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("carried.py", "NUMBER = 5\n")
        archive.writestr(
            "carried-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\n"
        )
        archive.writestr(
            "carried-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("carried-1.0.dist-info/RECORD", "")
    folder = REPOSITORY / "benchmarks" / "gpu"
    code = f"""
import os, runpy, sys
sys.path.insert(0, {str(folder)!r})
script = runpy.run_path({str(folder / "__main__.py")!r}, run_name="script")
script["install_wheels"](script["wheels_folder"](["device", "--wheels", {str(wheel.parent)!r}]))
import carried
print(carried.NUMBER, os.environ["PYTHONPATH"].split(os.pathsep)[0] in carried.__file__)
"""
    done = python(code, TMPDIR=str(tmp_path))
    assert done.stdout.split() == ["5", "True"], done.stderr
    missing = gpu("device", "--smoke", "--wheels", str(tmp_path))
    assert missing.returncode == 1 and "there are no wheels" in missing.stderr


def test_compiled_graphs_are_carried_if_they_fit(tmp_path, monkeypatch, capsys):
    path = tmp_path / command.COMPILED
    loaded: list[bytes] = []
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", loaded.append)
    for artifacts, kept in ((None, False), ((b"12345", None), False), ((b"1234", None), True)):
        monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda found=artifacts: found)
        command.save_compiled(path, most=4)
        command.load_compiled(path)
        assert path.exists() == kept
    assert loaded == [b"1234"] and "5 bytes, more than 4" in capsys.readouterr().out


def test_without_a_gpu_it_says_what_to_do(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = gpu("device", "--out", str(tmp_path))
    assert done.returncode == 1 and "--smoke" in done.stderr
    done = gpu("table", "--out", str(tmp_path))
    assert done.returncode == 1 and "nothing was measured yet" in done.stderr
