"""--devices of the commands beside pretrain."""

from __future__ import annotations

import csv
import json
import signal
from pathlib import Path
from statistics import median

import pytest

from tests.conftest import sets
from tests.fake_runs import write_jsonl
from tests.launch import run_ranks, start_efftrain, wait_until, write_recipe
from tests.trained_run import make_run, write_text
from tests.tune_warmup.search import SETTINGS

pytestmark = pytest.mark.slow


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    return write_recipe(tmp_path).name


def test_bench_says_what_two_devices_spend_on_each_other(efftrain, recipe):
    done = efftrain(f"bench --recipe {recipe} --devices 2 --steps 4 --format json")
    found = json.loads(done.stdout)
    assert len(found["peak_memory_bytes"]) == 2
    assert list(found["phases"]) == ["work", "sum", "wait"] and found["phases"]["sum"] > 0
    assert sum(found["phases"].values()) == pytest.approx(median(found["step_seconds"]))


def test_bench_claims_no_share_of_communication_for_shards(efftrain, recipe):
    """FSDP2's traffic is part of its passes."""
    sharded = "--set parallel.strategy=shard --devices 2 --steps 2"
    done = efftrain(f"bench --recipe {recipe} {sharded}")
    assert "work and traffic" in done.stdout and "sum " not in done.stdout


def test_resuming_on_two_devices_is_verified(efftrain, recipe):
    done = efftrain(f"verify-resume --recipe {recipe} --devices 2 --steps 2", timeout=300)
    assert "bit for bit" in done.stdout


def test_a_search_on_two_devices_finds_what_one_finds(efftrain, tmp_path):
    """Probes that end early, that end well, and one that is stopped by a signal."""
    options = "--duration optim.lr=1e-1,1e-3 --seeds 0,1 --steps 12 --threshold 1.05"
    search = sets(write_text(tmp_path), *SETTINGS)
    command = f"tune-warmup --recipe small --device cpu {options}"
    efftrain(f"{command} --name one", *search, timeout=300, code=4)  # none is stable
    two = f"{command} --name two --devices 2"
    process = start_efftrain(tmp_path, *two.split(), *search)
    probes = tmp_path / "runs" / "two" / "probes"
    wait_until(lambda: list(probes.glob("*/metrics.jsonl")), process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75 and "Traceback" not in errors
    efftrain(two, *search, timeout=300, code=4)
    first, second = (_receipts(tmp_path / "runs" / name) for name in ("one", "two"))
    assert first == second
    assert {"", "12"} <= {receipt["unstable_at"] and "12" for receipt in first}
    assert not (tmp_path / "recipes" / "small-tuned.toml").exists()


def _receipts(folder: Path) -> list[dict[str, str]]:
    """Read the columns of receipts.csv that rounding does not alter."""
    names = ("setting", "seed", "steps", "tokens", "unstable_at")
    with (folder / "receipts.csv").open(newline="") as file:
        return [{name: row[name] for name in names} for row in csv.DictReader(file)]


def test_two_processes_of_torchrun_score_as_one_does(efftrain, tmp_path, zygote):
    """Bit for bit, written once."""
    pytest.importorskip("lm_eval")
    lines = [{"goal": f"Find {n}", "sol1": "a ship", "sol2": "home", "label": 0} for n in range(9)]
    (tmp_path / "sets").mkdir()
    write_jsonl(tmp_path / "sets" / "piqa.jsonl", lines)
    found = []
    for name in ("one", "two"):
        run = make_run(tmp_path, name)
        words = ["eval-zeroshot", name, "--batch-tokens", "60", "--device", "cpu"]
        words += ["--data-dir", str(tmp_path / "sets")]
        if name == "one":
            efftrain("", *words)
        else:
            run_ranks(zygote, tmp_path, 2, *words)
        (entry,) = json.loads((run / "zeroshot.json").read_text())
        timed = ("seconds", "date", "sha256")
        timeless = {key: value for key, value in entry.items() if key not in timed}
        found.append((timeless, (run / "zeroshot_items.jsonl").read_text()))
    assert found[0] == found[1]
