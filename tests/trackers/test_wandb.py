"""What wandb is given, read back from the file it writes offline."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.run.columns import AXES
from efftrain_cli.run.metrics import latest_rows
from efftrain_cli.trackers import tensorboard
from efftrain_cli.trackers import wandb as wandb_sync
from efftrain_cli.trackers.rows import grouped, series_of
from tests.conftest import REPOSITORY, cli
from tests.fake_runs import rows_of, sealed_lines, write_run, write_sealed
from tests.launch import wait_until
from tests.trackers.follower import write_while_followed
from tests.wandb_files import read_history, read_records


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.delenv("WANDB_MODE", raising=False)


def test_synced_history_has_each_step_once_and_the_last_write_wins(tmp_path, monkeypatch, capfd):
    """F29; F53: nothing that is written has a secret, or a word about the machine."""
    secret = "0123456789abcdef0123456789abcdef01234567"
    monkeypatch.setenv("WANDB_API_KEY", secret)
    rows = rows_of(60, 0, loss=9.0) + rows_of(100, 0, segment=1, first=41, loss=2.0)
    path = write_run(tmp_path, "small", 0, rows=rows)
    done = cli("wandb-sync", str(path))
    first, last = done.stdout.splitlines()
    assert re.fullmatch(
        r"101 rows as wandb run small-seed0-[0-9a-f]{8} \(offline\), files in \S+/wandb", first
    )
    assert re.fullmatch(
        r"send them with: wandb sync \S+/wandb/offline-run-\*-small-seed0-[0-9a-f]{8}", last
    )
    assert done.stderr == ""
    history = read_history(path / "wandb")
    counting = latest_rows(path)
    assert len(history) == len(counting) == 101
    assert [row["_step"] for row in history] == list(range(101))
    assert [row["train/loss"] for row in history[1:]] == [9.0] * 40 + [2.0] * 60
    for row, expected in zip(history, counting, strict=True):
        values = [value for value in expected.values() if value is not None]
        assert sorted(map(float, values)) == sorted(
            float(value) for key, value in row.items() if not key.startswith("_")
        )
    files = [file for file in path.rglob("*") if file.is_file()]
    assert len(files) > 4
    assert not [file for file in files if secret.encode() in file.read_bytes()]
    for record in read_records(path / "wandb"):
        assert record.WhichOneof("record_type") not in ("environment", "stats")
        assert not record.run.HasField("git")


def test_columns_stand_in_groups():
    row = {"step": 3, "loss": 1.0, "val_loss": None, "pld_theta": 0.5, "of_tomorrow": 1}
    assert grouped(row) == {
        "axis/step": 3,
        "train/loss": 1.0,
        "progressive_layer_drop/theta": 0.5,
        "other/of_tomorrow": 1,
    }


def test_every_column_of_a_row_has_a_group():
    """What the trainer writes (tests/fake_runs.py follows it) is nowhere "other"."""
    (row,) = [row for row in rows_of(10, 0) if row["step"] == 10]
    assert not [name for name in map(series_of, row) if name.startswith("other/")]
    assert series_of("standardization_loss") == "standardization_loss/loss"
    assert series_of("std_kl_h.0.mlp.c_fc") == "standardization_loss/kl_h.0.mlp.c_fc"


def test_axes_summaries_scores_and_names(tmp_path, monkeypatch):
    """Curves over tokens, the lowest loss in the summary, zero-shot scores beside it; wandb's
    variables win."""
    path = write_run(tmp_path, "small", 0)
    entry = {"task": "piqa", "metric": "acc_norm", "value": 0.53, "limit": None}
    (path / "zeroshot.json").write_text(json.dumps([entry, {**entry, "task": "rte", "limit": 10}]))
    for name, value in (("PROJECT", "p1"), ("NAME", "n1"), ("RUN_GROUP", "g1"), ("ENTITY", "e1")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    wandb_sync.sync(path)
    records = read_records(path / "wandb")
    (run,) = [record.run for record in records if record.HasField("run")][:1]
    assert (run.project, run.display_name, run.run_group, run.entity) == ("p1", "n1", "g1", "e1")
    metrics = {
        m.metric.name or m.metric.glob_name: m.metric for m in records if m.HasField("metric")
    }
    assert metrics["*"].step_metric == "axis/tokens" and set(metrics) >= set(AXES.values())
    assert (
        metrics["val/loss"].summary.min
        and metrics["train/loss"].summary.min
        and metrics["stability/loss_ratio"].summary.max
    )
    summary = {
        (item.key or "/".join(item.nested_key)): json.loads(item.value_json)
        for record in records
        if record.HasField("summary")
        for item in record.summary.update
    }
    assert summary["zeroshot/piqa/acc_norm"] == 0.53
    assert not [key for key in summary if "rte" in key]


def test_tensorboard_has_the_same_curves(tmp_path, monkeypatch):
    """Read back with TensorBoard's own reader: each step once, the last write wins, also while a
    run is followed."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    rows = rows_of(60, 0, loss=9.0) + rows_of(100, 0, segment=1, first=41, loss=2.0)
    path = write_run(tmp_path, "small", 0, rows=rows)

    def read() -> tuple[list[int], list[float]]:
        events = accumulator.EventAccumulator(
            str(path / "tensorboard"), size_guidance={"scalars": 0}
        ).Reload()
        assert {
            "val/loss",
            "optim/lr",
            "throughput/tokens_per_second",
            "stability/loss_ratio",
        } <= set(events.Tags()["scalars"])
        loss = events.Scalars("train/loss")
        return [event.step for event in loss], [event.value for event in loss]

    shown = cli("wandb-sync --tensorboard", str(path)).stdout
    folder = path / "tensorboard"
    assert shown == f"101 rows for TensorBoard; see them with: tensorboard --logdir {folder}\n"
    assert read() == (list(range(101)), [9.0] * 41 + [2.0] * 60)
    later = rows_of(110, 0, segment=1, first=101, loss=1.0)
    write_while_followed(monkeypatch, path, sealed_lines(later))
    tensorboard.write(path, follow=True)
    assert read() == (list(range(111)), [9.0] * 41 + [2.0] * 60 + [1.0] * 10)


def steps_sent(folder: Path) -> list[int]:
    return [row["_step"] for row in read_history(folder)]


def test_follower_sends_what_is_written_while_it_runs_and_continues_after_a_resume(
    tmp_path, monkeypatch
):
    """Segments of one run directory are one wandb run; a step that was sent is not sent again."""
    path = write_run(tmp_path, "small", 0, rows=rows_of(20, 0))
    write_while_followed(monkeypatch, path, sealed_lines(rows_of(60, 0)[21:]))
    first = wandb_sync.follow(path, "offline", None)
    (folder,) = (path / "wandb").glob("offline-run-*")
    assert steps_sent(folder) == list(range(61))
    folder.rename(tmp_path / "first")

    write_sealed(path / "metrics.jsonl", rows_of(60, 0) + rows_of(80, 0, segment=1, first=41))
    second = wandb_sync.follow(path, "offline", None)
    assert steps_sent(path / "wandb") == list(range(61, 81))
    assert (second.id, second.rows) == (first.id, 20)


def test_without_a_key_online_becomes_offline_with_one_warning(tmp_path, monkeypatch, capsys):
    """F28: no key."""
    path = write_run(tmp_path, "small", 0)
    # A folder of settings of its own: the key of whoever runs the tests must not count.
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    write_while_followed(monkeypatch, path)
    assert wandb_sync.follow(path, "online", None).mode == "offline"
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: ") and "kept offline" in warning
    assert steps_sent(path / "wandb") == list(range(101))


def test_a_child_s_message_is_printed_with_its_fix(tmp_path, monkeypatch, capsys):
    """What wandb prints is no part of it."""
    path = write_run(tmp_path, "small", 0)
    (path / "wandb").mkdir()
    ended = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE)
    monkeypatch.setattr(wandb_sync, "start_follower", lambda *_: ended)
    for fault, shown in (
        ("error: it broke\n  mend it\n", "it broke\n  mend it"),
        ("ConnectionResetError: [Errno 104]\n", "ConnectionResetError: [Errno 104]"),
    ):
        log = f"wandb: Tracking run\n{fault}wandb: Bye\n"
        (path / "wandb" / wandb_sync.LOG).write_text(log)
        with wandb_sync.followed(path, "online", tensorboard=False):
            pass
        assert capsys.readouterr().err == (
            f"warning: wandb: {shown}\n"
            "  metrics.jsonl has every row: efftrain wandb-sync small-seed0 sends them\n"
        )


@pytest.mark.parametrize(
    "recipe, variable, mode",
    [("online", "offline", "offline"), ("online", "disabled", "off"), ("off", "online", "off")],
)
def test_wandb_mode_of_the_environment_wins(monkeypatch, recipe, variable, mode):
    monkeypatch.setenv("WANDB_MODE", variable)
    assert wandb_sync.chosen_mode(recipe) == mode
    monkeypatch.setenv("WANDB_MODE", 99 * "x")
    words = f"WANDB_MODE = '{40 * 'x'}' .*\n  set it to online, offline, dryrun, disabled"
    with pytest.raises(UsageError, match=words):
        wandb_sync.chosen_mode("online")


@pytest.mark.slow
def test_the_child_outlives_a_killed_parent_and_then_ends(tmp_path):
    path = write_run(tmp_path, "small", 0)
    script = (
        "import sys, time; from pathlib import Path; from efftrain_cli.trackers.wandb import"
        " LOG, start_follower\n"
        f"child = start_follower(Path({str(path)!r}), ['--mode', 'offline'], LOG);"
        " print(child.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    wait_until(
        lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    )
    assert len(read_history(path / "wandb")) == 101
