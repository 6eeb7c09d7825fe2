"""`efftrain calibrate`: which steps are timed and how often, true steps, and what it refuses and
leaves behind."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from efftrain_cli import calibrate as command
from efftrain_cli.calibrate import Arm, Lane, TimedStep, design, spread
from efftrain_cli.foundation.step import Progress
from efftrain_cli.run.calibrations import read_calibrations
from efftrain_cli.trials import calibrating
from tests.compare.calibrations import calibrated
from tests.compare.known_runs import SLW
from tests.conftest import invoke
from tests.fake_runs import rows_of, write_run
from tests.launch import made_text, start_efftrain, wait_until


def steps(*flops: float, kind: int = 0) -> list[TimedStep]:
    """Steps that take a second per FLOP."""
    return [TimedStep(kind, each, each, Progress()) for each in flops]


def arms(*kinds: list[list[TimedStep]]) -> list[Arm]:
    named: Any = {"recipe": None, "name": "r", "run": "r", "digest": "d", "vocab_size": 9}
    return [Arm(kinds=each, **named) for each in kinds]


def test_steps_are_spread_over_their_flops():
    """At 1, 33.25, 65.5, 97.75, 130: the nearest of each."""
    chosen = spread(steps(1, 2, 30, 40, 70, 80, 100, 130), 5)
    assert [step.flops for step in chosen] == [1, 30, 70, 100, 130]
    assert [step.flops for step in spread(steps(1, 2, 3), 2)] == [1, 3]
    assert len(spread(steps(1, 2, 3), 3)) == 3


@pytest.mark.parametrize(
    ("spent", "count", "blocks"),
    [
        # 2 % are 13 blocks of 4 + (1 + 2 + 3 + 4) = 14 seconds; one of them runs unmeasured.
        (9100, 5, 12),
        # 2 % are 12.99 of these blocks: three steps of 1, 2 and 4 seconds leave 16 blocks of 11.
        (9095, 4, 15),
        # Two steps a kind, 1 and 4 seconds beside the other's 4: 9 a block.
        (900, 3, 3),
        (100, 3, 3),
        (10**6, 5, 50),
    ],
)
def test_blocks_take_two_percent(spent, count, blocks):
    plan = design(arms([steps(4)], [steps(1, 2, 3, 4)]), spent)
    assert (sum(map(len, plan.steps)), plan.blocks) == (count, blocks)
    assert blocks == 3 or plan.seconds <= 0.02 * spent


def test_at_most_sixteen_steps_are_timed():
    many = [float(each) for each in range(1, 41)]
    plan = design(arms([steps(*many)], [steps(*many)]), 10**9)
    assert [len(each) for each in plan.steps] == [8, 8]
    kinds = [steps(*many, kind=kind) for kind in range(6)]
    assert [len(each) for each in design(arms(kinds, kinds), 10**9).steps] == [12, 12]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two recipes with a text, and the folder of runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EFFTRAIN_RUNS", str(tmp_path / "runs"))
    (tmp_path / "text.txt").write_text(made_text(50_000))
    (tmp_path / "plain.toml").write_text(
        "[model]\nn_layer = 2\nn_head = 2\nn_embd = 32\nseq_len = 32\n"
        '[data]\ntrain = "text.txt"\ntokenizer = "bpe:300"\nvalid_fraction = 0.1\n'
        "[optim]\nlr = 1e-3\nwarmup_steps = 2\n"
        '[train]\ntokens = 5120\nbatch_size = 8\nmicro_batch_tokens = 128\ndtype = "fp32"\n'
        "[eval]\nevery = 5\nwindows = 4\n"
    )
    (tmp_path / "warm.toml").write_text(
        'base = "plain.toml"\n[seq_len_warmup]\nstart = 8\nsteps = 10\n'
    )
    return tmp_path


SWEEP = "sweep --recipe plain.toml --recipe warm.toml --seeds 0..1 --device cpu --quiet"


@pytest.mark.slow
def test_true_steps_end_to_end(here, efftrain):
    """A sweep of toys names the command; after it, compare judges seconds or says how the clocks
    differ."""
    done = efftrain(SWEEP, timeout=600)
    assert done.returncode == 0, done.stderr
    line = "efftrain calibrate plain-seed0 plain-seed1 warm-seed0 warm-seed1"
    assert line in " ".join(done.stdout.split())
    done = efftrain(f"{line.removeprefix('efftrain ')} --device cpu")
    assert done.returncode == 0, done.stderr
    assert "3 blocks" in done.stderr and "calibrated, warm takes" in done.stdout
    (calibration,) = read_calibrations().valid
    plain, warm = calibration.arms
    assert [step.kind for step in warm.steps] == [0, 0] and len(plain.steps) == 1
    rows = (here / "runs" / "warm-seed0" / "metrics.jsonl").read_text().splitlines()
    flops = [json.loads(row).get("flops") for row in rows]
    real = [each for each in flops if each]
    assert [step.flops for step in warm.steps] == [min(real), max(real)]
    assert {len(step.seconds) for each in calibration.arms for step in each.steps} == {3}
    shown = efftrain("compare plain warm --format json")
    rows_shown = {row["measure"]: row for row in json.loads(shown.stdout)["rows"] if row["tested"]}
    reason = rows_shown["seconds_to_match"]["reason"]
    assert reason is None or "by calibrated steps, more than 2 % apart" in reason
    listed = efftrain("runs list")
    assert "calibrations" not in listed.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "section",
    [
        (
            "[simigrad]\ntarget = 0.5\nmin_batch_size = 4\nmax_batch_size = 16\nquantum ="
            " 2\ninterval = 3\n"
        ),
        "[progressive_layer_drop]\ntheta = 0.5\nsteps = 10\n",
        "[batch_size_warmup]\nstart = 2\nincrement = 2\nsequences = 60\n",
        (
            '[[stages]]\nmodel = { n_layer = 1 }\nswitch = { rule = "steps", value = 8 }\n'
            '[[stages]]\noperators = ["depth"]\nrewarmup_steps = 2\n'
        ),
        '[ouroboros]\nmodules = 2\nvariant = "replay"\n',
    ],
    ids=lambda section: section[1:9],
)
def test_every_method_s_steps_run_again(here, efftrain, section):
    """Their FLOPs are those of the run's rows, or the command fails."""
    (here / "method.toml").write_text(f'base = "plain.toml"\n{section}')
    for recipe in ("plain", "method"):
        done = efftrain(f"pretrain {recipe}.toml --device cpu --quiet")
        assert done.returncode == 0, done.stderr
    done = efftrain("calibrate plain method --device cpu")
    assert done.returncode == 0, done.stderr
    (calibration,) = read_calibrations().valid
    kinds = {step.kind for step in calibration.arms[1].steps}
    expected = {"[s": {0, 1}, "[[": {0, 2}}.get(section[:2], {0})
    assert kinds == expected


@pytest.mark.slow
def test_ctrl_c_leaves_nothing(here, efftrain):
    assert efftrain(SWEEP, timeout=600).returncode == 0
    temporary = here / "tmp"
    temporary.mkdir()
    for name in ("plain", "warm"):  # as if training had taken a day: calibration takes half an hour
        for seed in range(2):
            metrics = here / "runs" / f"{name}-seed{seed}" / "metrics.jsonl"
            rows = [json.loads(line) for line in metrics.read_text().splitlines()]
            for row in rows:
                row.pop("check", None)
                row["train_seconds"] *= 1e5
                if "seconds" in row:
                    row["seconds"] *= 100
            metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    child = start_efftrain(
        here, "calibrate", "plain", "warm", "--device", "cpu", TMPDIR=str(temporary)
    )
    wait_until(lambda: any(temporary.iterdir()), child)
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 130 and "Traceback" not in errors
    assert not list(temporary.iterdir())
    assert not (here / "runs" / "calibrations").exists()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of runs."""
    monkeypatch.setenv("EFFTRAIN_RUNS", str(tmp_path))
    return tmp_path


def made(root: Path, seconds: float = 5.0, seeds: int = 2, **more: Any) -> None:
    """Two recipes; every run trained for so long."""
    for seed in range(seeds):
        for name, section in (("small", ""), ("small-slw", SLW)):
            rows = [row | {"train_seconds": row["step"] * seconds / 100} for row in rows_of(100, 0)]
            rows = [row | {"loss": seed} for row in rows]
            write_run(root, name, seed, rows=rows, more=section, **more)


@pytest.mark.parametrize(
    ("names", "origin", "message"),
    [
        (
            ("small",),
            {},
            "calibrate times two recipes or more side by side\n  name finished runs of each",
        ),
        (("small", "small-slw"), {}, "were trained with device Some CPU, and this is "),
        (("small", "small-slw"), {"world_size": 2}, "steps are timed on one device"),
        (("no-such",), {}, "is called 'no-such'\n  `efftrain runs list` shows"),
    ],
)
def test_what_cannot_be_timed_is_refused(root, names, origin, message):
    made(root, origin=origin)
    refused = invoke("calibrate", *names, "--device", "cpu")
    assert refused.exit_code != 0 and message in str(refused.exception)
    assert not (root / "calibrations").exists()


@pytest.fixture
def as_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has the made runs' processor and PyTorch."""
    monkeypatch.setattr(command, "device_name", lambda device: "Some CPU")
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)


def test_a_run_of_another_torch_is_refused(root, as_cpu):
    made(root, origin={"torch": "2.12.1"})
    refused = invoke("calibrate small small-slw --device cpu")
    assert "with torch 2.12.1, and this is 2.13.0+cpu" in str(refused.exception)


def test_a_step_that_is_not_the_run_s_any_more_is_refused(root, as_cpu):
    """2 % of 4 runs of 6 s are 4 blocks of two steps of 50 ms, one of them unmeasured: 0.4 of 24
    s."""
    made(root, 6.0)
    refused = invoke("calibrate small small-slw --device cpu")
    message = "step 1 of small-seed0 has 6.144e+08 FLOPs in its row and 1.01764e+09 now"
    assert message in str(refused.exception)
    assert not (root / "calibrations").exists()
    timing = "2 steps of 2 recipes in 3 blocks, about 400 ms: 1.7 % of the runs' training"
    assert timing in refused.stderr


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command lines that are started; each fails."""
    found: list[list[str]] = []

    def run(arguments: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        found.append(arguments[3:])
        return subprocess.CompletedProcess(arguments, 2, "", "error: too little memory\n")

    monkeypatch.setattr(calibrating.subprocess, "run", run)
    return found


def read(root: Path) -> list[Any]:
    from efftrain_cli.compare.comparison import read_valid_runs

    return read_valid_runs(sorted(root.glob("small*")))[0]


def test_a_sweep_times_steps_once(root, started, capfd):
    """100 seconds of training in all; a failure is a warning."""
    made(root, 25.0)
    calibrating.calibrate_once(read(root), "cpu")
    names = ["small-seed0", "small-seed1", "small-slw-seed0", "small-slw-seed1"]
    assert started == [["calibrate", "--quiet", "--device", "cpu", *names]]
    shown = capfd.readouterr().err
    assert "timing steps of 2 recipes side by side" in shown
    assert "warning: steps were not timed, so seconds are not judged: error: too little" in shown
    calibrated(root, {"small": [0.25] * 3, "small-slw": [0.25] * 3})
    calibrating.calibrate_once(read(root), "cpu")
    assert len(started) == 1


@pytest.mark.parametrize(
    ("seconds", "seeds", "origin"),
    [(24.0, 2, {}), (100.0, 1, {}), (25.0, 2, {"world_size": 2})],
    ids=["toys", "one seed", "two devices"],
)
def test_nothing_is_timed_that_no_verdict_needs(root, started, seconds, seeds, origin):
    made(root, seconds, seeds, origin=origin)
    calibrating.calibrate_once(read(root), "cpu")
    assert started == []


def test_each_arm_s_steps_have_its_own_determinism():
    seen = []

    def stepping() -> Iterator[Any]:
        while True:
            seen.append(torch.are_deterministic_algorithms_enabled())
            yield SimpleNamespace(plan=True)

    lanes = []
    for deterministic in (True, False):
        lane: Any = object.__new__(Lane)
        lane.recipe = SimpleNamespace(train=SimpleNamespace(deterministic=deterministic))
        lane.windows = SimpleNamespace(timed=0)
        lane.stages = {0: (SimpleNamespace(progress=None), stepping())}
        lanes.append(lane)
    (step,) = steps(1)
    for lane in (*lanes, *reversed(lanes)):
        lane.run(step)
    assert seen == [True, False, False, True]
    lanes[1].run(step)


def test_blocks_of_one_seed_each_are_timed(root, started):
    """Each seed of an arm has settings of its own."""
    for seed in range(2):
        for name, section in (("small", ""), ("small-slw", SLW)):
            rows = [
                row | {"train_seconds": row["step"] / 2, "loss": seed} for row in rows_of(100, 0)
            ]
            write_run(root, name, seed, rows=rows, lr=1e-3 * (1 + seed), more=section)
    calibrating.calibrate_once(read(root), "cpu")
    assert len(started) == 1
