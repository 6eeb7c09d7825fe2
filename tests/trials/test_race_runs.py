"""A race of real runs: killed, continued, and its baseline used again."""

from __future__ import annotations

import signal

import pytest

from efftrain_cli.run.small_files import read_run
from tests.launch import start_efftrain, wait_until

WORDS = ["race", "plain.toml", "warm.toml", "--pairs", "2,3", "--device", "cpu"]


@pytest.mark.slow
def test_a_killed_race_continues_and_its_baseline_is_used_again(folder, efftrain):
    runs = folder / "runs"
    process = start_efftrain(folder, *WORDS)
    wait_until(lambda: list(runs.glob("race-warm-*-seed100/metrics.jsonl")), process)
    process.send_signal(signal.SIGKILL)
    process.wait()

    done = efftrain(*WORDS, timeout=500)
    assert "in final loss" in done.stdout and "2 pairs: warm " in done.stderr
    trained = sorted(path.name for path in runs.glob("race-*-seed*"))
    assert len(trained) in (4, 6)
    for name in trained:
        events = [event["event"] for event in read_run(runs / name).events]
        assert events.count("start") == 1, "nothing is trained twice"
        (last,) = (runs / name / "checkpoints").iterdir()
        assert not (last / "optimizer.safetensors").exists(), "the last weights alone"
    assert "no damage" in efftrain("runs", "verify", trained[0]).stdout

    (folder / "other.toml").write_text('base = "warm.toml"\n[optim]\nlr = 2e-3\n')
    second = efftrain("race", "plain.toml", "other.toml", "--pairs", "2", timeout=500)
    assert "as race 2 against plain" in second.stdout or "not judged" in second.stdout
    assert "of an earlier race are used" in second.stdout
    assert len(list(runs.glob("race-plain-*-seed*"))) == len(trained) // 2

    (race,) = (path.parent.name for path in runs.glob("race-plain-other-*/plan.json"))
    efftrain("runs", "rm", race, "--yes")
    assert not list(runs.glob("race-other-*")) and not (runs / race).exists()
    assert len(list(runs.glob("race-*-seed*"))) == len(trained), "the baseline's runs stay"
