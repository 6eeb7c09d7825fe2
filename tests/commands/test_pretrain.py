"""`efftrain pretrain` as a user meets it: what it says and refuses, and how a run is trained
longer."""

from __future__ import annotations

import json
import re
import shutil
from io import StringIO
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from efftrain_cli.foundation.step import Progress
from efftrain_cli.plan.describe import steps_line
from efftrain_cli.plan.preview import summarize_plan
from efftrain_cli.recipe.recipe import Recipe, load_recipe
from efftrain_cli.training import display, dist
from tests.damage import flip
from tests.fake_runs import read_jsonl
from tests.faults.damage import contents
from tests.launch import Laboratory
from tests.tiny import windows_of


@pytest.fixture
def trained(lab: Laboratory) -> Laboratory:
    """Run `r` of BASELINE: 20 steps of 128 tokens, cosine from 3e-3 to 3e-4."""
    lab.train_whole()
    shutil.copytree(lab.run("whole"), lab.run("r"))
    return lab


def test_a_resume_with_nothing_to_train_says_so_and_leaves_no_mark(trained):
    before = contents(trained.run("r"))
    said = trained.resume().output
    assert "used its budget of 2,560 tokens, after step 20" in said
    assert "efftrain pretrain --resume r --set train.tokens=N" in said
    behind = trained.resume("r", "--set train.tokens=5120 --steps 20")
    assert "after step 20 already, and --steps 20 ends there" in behind.output
    # A budget that the text does not have is refused once its data is prepared, and an accepted
    # rate with it.
    for more in ("--set train.tokens=1M", "--set optim.lr=1e-3 --override-resume"):
        refused = trained.resume("r", f"--set train.tokens=1M {more}", code=2)
        assert "data.repeat" in refused.errors
    assert contents(trained.run("r")) == before
    assert trained.events("r", "override") == []


def test_training_longer_keeps_the_schedule_to_its_old_end(trained):
    done = trained.resume("r", "--set train.tokens=5120")
    rates = {row["step"]: row["lr"] for row in trained.rows("r") if row["step"]}
    assert sorted(rates) == list(range(1, 41))
    assert rates[20] == pytest.approx(3e-4), "the cosine ends with the old budget's last step"
    assert {rates[step] for step in range(21, 41)} == {3e-4}
    assert "lr      goes on at 0.0003 with step 21" in done.output
    assert trained.events("r", "override")[0]["differences"] == [
        ["train.tokens", 2560, 5120],
        ["optim.decay_tokens", None, 2560],
    ]
    # The new recipe is the run's own from now on: continuing needs nothing more.
    trained.resume("r", "--set train.tokens=5248")
    assert trained.last_step("r") == 41


def test_a_longer_schedule_is_asked_for_and_its_jump_is_shown_first(trained):
    longer = "--set train.tokens=5120 --set optim.decay_tokens=5120"
    for changed in (longer, "--set train.tokens=2432"):
        assert "--override-resume" in trained.resume("r", changed, code=2).errors
    done = trained.resume("r", f"{longer} --override-resume")
    # Step 21 has trained 2,688 of 5,120 tokens, 640 of them while warming up: cos at (2688 - 640) /
    # (5120 - 640).
    assert "lr      jumps from 0.0003 to 0.00183 with step 21" in done.output
    said = done.output
    assert said.index("jumps from") < said.index("resumed r after step 20 of 40")
    assert trained.rows("r")[21]["lr"] == pytest.approx(0.00183, rel=5e-3)


def test_the_speed_of_a_run_in_one_go_is_kept_for_plans(lab):
    """6 x (320 x 64 + 2 x (12 x 64^2 + 13 x 64) + 2 x 64) + 12 x 2 x 64 x 32 = 772,608 FLOPs a
    token; a run that is short, or was continued, says nothing."""
    cache = {"EFFTRAIN_CACHE": str(lab.folder / "cache")}
    lab.train("short", "--steps 9", **cache)
    lab.resume("short", **cache)
    assert not (lab.folder / "cache" / "bench.jsonl").exists()
    lab.train("whole", "--steps 10", **cache)
    (rate,) = read_jsonl(lab.folder / "cache" / "bench.jsonl")
    assert (rate["source"], rate["n_layer"], rate["n_embd"]) == ("run whole", 2, 64)
    assert rate["device_kind"] == "cpu" and rate["flops_per_token"] == 772_608
    last = read_jsonl(lab.run("whole") / "metrics.jsonl")[-1]
    assert rate["train_share"] == last["train_seconds"] / last["wall_seconds"]
    assert rate["flops_per_second"] == pytest.approx(1280 * 772_608 / last["train_seconds"])


def test_a_missing_extra_is_said_before_step_1(trained):
    """Exit code 2, and nothing is made or changed."""
    inject = (
        "import efftrain_cli.trackers.tensorboard as board; board.find_spec = lambda name: None"
    )
    before = contents(trained.run("r"))
    new = trained.train("new", "--tensorboard", inject=inject, code=2)
    longer = "--tensorboard --set train.tokens=5120"
    again = trained.resume("r", longer, inject=inject, code=2)
    for process in (new, again):
        assert "TensorBoard is not installed\n  in the folder" in process.errors
    assert contents(trained.run("r")) == before and not trained.run("new").exists()


def test_a_sample_is_shown_at_each_evaluation_and_moves_no_bit(trained):
    done = trained.train("shown", "--set 'eval.sample=\"the ea\"'")
    samples = trained.events("shown", "sample")
    assert [event["step"] for event in samples] == [0, 5, 10, 15, 20]
    assert len({event["text"] for event in samples}) == 5, "the model has learned in between"
    assert all(f"--- after step {step}: the ea" in done.output for step in (0, 5, 20))
    trained.assert_equal_runs("shown", "r", 20)
    # What is shown may change when a run is continued: nothing that is computed depends on it.
    trained.resume("shown", "--set eval.sample=x --set train.tokens=2688")
    assert trained.events("shown", "sample")[-1]["prompt"] == "x"


def test_one_step_is_one_line(lab):
    said = lab.train("r", "--steps 1").output
    assert said.count("step 1/1") == 1
    assert re.search(r"\nresult  val loss \d\.\d{4} nats/token; 128 tokens, ", said)
    assert said.endswith("\nnext    efftrain pretrain --resume r\n")
    origin = json.loads((lab.run("r") / "origin.json").read_text())
    assert origin["command"][:2] == ["efftrain", "pretrain"]
    assert "\nresult  not trained: val loss " in lab.train("none", "--steps 0").output


@pytest.mark.parametrize(
    ("loss", "ends"),
    [
        # Half of the training text is token 1, half token 2: ln 2 nats, within 1 %.
        (0.6870, ["result  val loss 0.6870 nats/token: stuck; token frequencies alone give 0.693"]),
        (
            0.6800,
            [
                "result  val loss 0.6800 nats/token; 2,560 tokens, 3 TFLOPs, 44 s",
                'next    efftrain sample r-seed1 --prompt "The"',
            ],
        ),
    ],
)
def test_a_run_ends_with_its_result_and_the_next_command(lab, shown, tmp_path, loss, ends):
    session = session_of(load_recipe(lab.recipe()))
    session.corpus.train = windows_of(tmp_path, np.tile([1, 2], 50_000), 32, 0).shards
    session.val_windows = torch.ones(4, 33, dtype=torch.int64)
    progress = Progress(step=20, tokens=2560, flops=3e12, train_seconds=44.0)
    run: Any = SimpleNamespace(name="r-seed1", path=tmp_path)
    display.show_result(shown, run, session, progress, loss)
    assert shown.file.getvalue().splitlines() == ends


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Console:
    """A console that keeps what is printed."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    return Console(file=StringIO(), width=500)


def session_of(recipe: Recipe) -> Any:
    """A session on the CPU, with a text of 1.5 epochs."""
    text = SimpleNamespace(tokens=50_000, documents=1)
    manifest = SimpleNamespace(notes=["a note"])
    windows = SimpleNamespace(
        epochs=lambda windows: 1.5, epochs_of_sources=lambda windows: {}, per_epoch=1000
    )
    return SimpleNamespace(
        recipe=recipe,
        corpus=SimpleNamespace(train=text, vocab_size=300, manifest=manifest),
        train_data=windows,
        val_windows=torch.zeros(4, 33),
        device=torch.device("cpu"),
    )


def test_the_header_says_what_is_trained(lab, shown, monkeypatch):
    """320 rows and 32 positions x 64, 2 x (12 x 64^2 + 13 x 64) + 2 x 64: 122,624 parameters."""
    recipe = load_recipe(lab.recipe(), ["data.train=stdlib", "train.deterministic=true"])
    plan = summarize_plan(recipe, vocab_size=300)
    monkeypatch.setattr(display, "data_warnings", lambda *words: ["little text"])
    run: Any = SimpleNamespace(name="r-seed1")
    display.show_header(shown, run, session_of(recipe), plan)
    first, *others = shown.file.getvalue().splitlines()
    assert first == "run     r-seed1 on cpu, 2 threads, fp32, deterministic kernels"
    assert others == [
        "text    stdlib: 50K tokens for training; 1.50 epochs",
        "model   2 x 64, context 32: 123K parameters",
        "warning: a note",
        "warning: little text",
    ]


def test_the_line_of_steps_says_time_devices_and_a_faster_type(lab, shown, monkeypatch):
    recipe = load_recipe(lab.recipe())
    plan = summarize_plan(recipe, vocab_size=300)
    display.show_steps(shown, recipe, plan, 400.0, speedup=1.05)
    display.show_steps(shown, recipe, plan, 8.0, resumed="r-seed1 after step 5")
    monkeypatch.setattr(dist, "world_size", lambda: 4)
    display.show_steps(shown, recipe, plan, 100.0, speedup=1.66)
    alone, resumed, together, faster = shown.file.getvalue().splitlines()
    assert alone == (
        "steps   20 of 128 tokens; lr 0.003 after 5, cosine to 0.0003; about 6 min 40 s (probed)"
    )
    assert resumed == "resumed r-seed1 after step 5 of 20; about 8 s (probed)"
    assert together.endswith("; about 1 min 40 s (probed, if 4 devices share them at no cost)")
    assert faster == "dtype   bf16 would be about 1.7 times faster here: --set train.dtype=bf16"
    branch = summarize_plan(recipe, Progress(step=15, tokens=1920), vocab_size=300)
    assert steps_line(recipe, branch).startswith("steps   16 to 20 of 128 tokens; ")


def test_a_changed_file_is_verified_and_all_tokens_if_asked(lab):
    """F34: a bit that flips on the disk leaves no other trace."""
    cache = {"EFFTRAIN_CACHE": str(lab.folder / "cache")}
    lab.train("r", "--steps 0", **cache)
    (shard,) = (lab.folder / "cache").glob("corpora/*/train.bin")
    flip(shard, 8000)
    errors = lab.resume("r", "--steps 1", code=3, **cache).errors
    assert f"{shard}: its tokens are not those that were written" in errors
    stat = shard.stat()
    verified = shard.with_name("verified.json")
    known = json.loads(verified.read_text())
    known["train"] = [stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
    verified.write_text(json.dumps(known))
    lab.resume("r", "--steps 1", **cache)
    again = lab.resume("r", "--steps 2 --verify-data full", code=3, **cache)
    assert again.errors == errors
