"""Killed, stopped and continued runs end as undisturbed ones, bit for bit."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from efftrain_cli import verify_resume
from efftrain_cli.foundation.errors import CheckpointError
from efftrain_cli.foundation.files import abandoned_in, is_locked
from efftrain_cli.recipe.recipe import load_recipe
from efftrain_cli.run.metrics import latest_rows
from efftrain_cli.run.reading import load_run
from efftrain_cli.training.evaluation import evaluate
from efftrain_cli.training.record import read_records
from efftrain_cli.training.session import fresh_state, prepare_session
from efftrain_cli.training.stages import train_stages
from efftrain_cli.verify_resume import compare_runs
from tests.conftest import cli, sets
from tests.fake_runs import write_sealed
from tests.faults.damage import call
from tests.launch import made_text, wait_until, write_recipe


def test_a_stop_and_a_resume_move_no_bit(lab):
    """F5, F6: three resumes in a row, with gradients in flight."""
    recipe = lab.recipe(extra="[ouroboros]\nmodules = 2\n")
    lab.train("whole", recipe=recipe)
    lab.call("pretrain", "--recipe", recipe, "--name", "cut", "--steps", "3")  # with its probe
    lab.resume("cut", "--steps", "10")
    lab.resume("cut", "--steps", "17")
    assert "continued with" not in lab.resume("cut").errors
    lab.assert_equal_runs("cut", "whole", 20, evaluated=(3, 17))


@pytest.mark.slow
def test_twenty_kills(lab):
    """F1: SIGKILL at random instants; every restart succeeds by itself, and nothing differs in the
    end."""
    recipe = lab.recipe(tokens="6400")  # 50 steps
    lab.train("whole", recipe=recipe)
    generator = random.Random(1)
    command = lab.words("r", recipe)
    for _ in range(20):
        process = lab.start(*command)
        before = lab.last_step("r")
        end = time.monotonic() + generator.uniform(0.05, 1.2)
        while time.monotonic() < end and not process.ended():
            time.sleep(0.002)
        if not process.ended():
            process.kill(signal.SIGKILL)
        assert process.wait() in (0, -signal.SIGKILL), process.errors
        # What it was starting holds its lock for a moment, and the next run leaves that folder.
        for left in abandoned_in(lab.folder / "runs", "r"):
            wait_until(lambda: not is_locked(left / "lock"))  # noqa: B023
        saved = [int(path[5:]) for path in lab.checkpoints("r") if not path.endswith(".tmp")]
        assert before <= lab.last_step("r") <= max(saved, default=0) + 5
        if (lab.run("r") / "recipe.toml").exists():
            command = ("pretrain", "--resume", "r", "--from-start", "--no-probe")
        if process.code == 0:
            lab.assert_equal_runs("r", "whole", 50)
            shutil.rmtree(lab.run("r"))
            command = lab.words("r", recipe)
    lab.call(*command)
    lab.assert_equal_runs("r", "whole", 50)
    assert not list((lab.folder / "runs").rglob("*.tmp"))


KILLED_AT_STEP_9 = """
import os, signal
from efftrain_cli.data.windows import Windows
batch = Windows.batch

def ending(self, plan, *rest):
    if plan.step == 10:
        os.kill(os.getpid(), signal.SIGKILL)
    return batch(self, plan, *rest)

Windows.batch = ending
"""


def test_a_run_without_a_checkpoint_begins_again_only_if_asked(lab):
    """F1: killed in its first minute; 9 steps are logged and none is saved."""
    recipe = lab.recipe()
    text = Path(recipe).read_text()
    text = text.replace("[checkpoint]\nevery = 5", '[checkpoint]\nevery = "10min"')
    Path(recipe).write_text(text)
    lab.train(recipe=recipe, inject=KILLED_AT_STEP_9, code=-9)
    logged = lab.last_step("r")
    refused = lab.resume("r", code=3)
    assert refused.errors.splitlines() == [
        f"error: run r logged {logged} steps and saved no checkpoint",
        "  from step 1 again: efftrain pretrain --resume r --from-start",
    ]
    assert lab.last_step("r") == logged
    lab.resume("r", "--from-start")
    lab.train("whole", recipe=recipe)
    lab.assert_equal_runs("r", "whole", 20)


@pytest.mark.parametrize("text", ["notes", "a.jsonl.gz", "a.parquet"])
def test_a_text_of_each_kind_becomes_a_model_in_one_command(lab, text):
    """A folder of Markdown, JSON lines or Parquet."""
    path = lab.folder / text
    documents = pd.DataFrame({"text": made_text().splitlines()})
    if text == "notes":
        path.mkdir()
        for number in range(20):
            (path / f"{number}.md").write_text("\n\n".join(documents.text[number::20]))
    elif text == "a.parquet":
        documents.to_parquet(path)
    else:
        documents.to_json(path, orient="records", lines=True)
    settings = sets(f"data.train={path}", "data.valid_fraction=0.1")
    assert "result " in lab.train("r", *settings, "--steps", "2").output


def generators() -> tuple[object, ...]:
    """Return the states of all generators of random numbers."""
    numpy = np.random.get_state()[1].tolist()
    return torch.get_rng_state().tolist(), random.getstate(), numpy


def test_other_activity_between_steps_draws_no_random_number(lab):
    """F7: evaluation, sampling and reading data change neither the training nor any generator."""
    recipe = load_recipe(lab.recipe(extra="[progressive_layer_drop]\ntheta = 0.5\nsteps = 20\n"))
    session = prepare_session(recipe, torch.device("cpu"))
    losses, before, after = [], None, None
    for disturbed in (False, True):
        state = fresh_state(session)
        if not disturbed:
            before = generators()
        for record in train_stages(state, recipe, session.train_data, session.val_windows, until=8):
            losses += [
                row["loss"] for row in read_records(state, recipe, [record]) if "loss" in row
            ]
            if disturbed:
                evaluate(state, recipe, session.val_windows)
                session.train_data.starts(100, 3)
                torch.rand(7), random.random(), np.random.rand(3)
        if not disturbed:
            after = generators()
    assert losses[:8] == losses[8:]
    assert before == after


def test_verify_resume_names_the_first_difference(lab):
    lab.train_whole()
    a, b = lab.run("whole"), lab.run("b")
    shutil.copytree(a, b)
    assert compare_runs(a, b, 20) == (21, 4 * 28)
    path = lab.checkpoint("b", 20) / "optimizer.safetensors"
    tensors = load_file(path)
    tensors["exp_avg_sq.h.1.mlp.c_fc.weight"][3, 5] += 1e-9
    save_file(tensors, path)
    found = (
        r"tensors after step 20: .* Greatest absolute difference: .* at index \(3, 5\)"
        r" .*'exp_avg_sq.h.1.mlp.c_fc.weight'"
    )
    with pytest.raises(CheckpointError, match=found):
        compare_runs(a, b, 20)
    rows = latest_rows(b)
    loss = rows[7]["loss"]
    rows[7]["loss"] = loss + 1
    write_sealed(b / "metrics.jsonl", rows)
    found = rf"step 7: loss is {loss} undisturbed and {loss + 1} continued"
    with pytest.raises(CheckpointError, match=found):
        compare_runs(a, b, 20)


def verify_here(monkeypatch: pytest.MonkeyPatch, folder: Path, run: Callable[..., Any]) -> Any:
    """Give `verify-resume r.toml`, whose processes are calls of `run`."""
    monkeypatch.chdir(folder)
    write_recipe(folder, extra="[seq_len_warmup]\nstart = 8\nsteps = 10\n")
    processes = SimpleNamespace(run=run, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr(verify_resume, "subprocess", processes)
    return call("verify-resume r.toml --device cpu --steps 2")


def test_verify_resume_says_what_it_compared(tmp_path, monkeypatch):
    def run(command: list[str], **options: object) -> Any:
        cli(*command[3:])
        return SimpleNamespace(returncode=0)

    code, shown = verify_here(monkeypatch, tmp_path, run)
    assert code == 0 and shown.splitlines() == [
        (
            "recipe cut to 2 micro-batches a step of 2 x 32 tokens, 4 steps; seq_len_warmup moved"
            " into them"
        ),
        "stopped after step 2, continued in a new process to step 4",
        "identical: 112 tensors and 5 rows, bit for bit",
    ]
    assert not list((tmp_path / "runs").iterdir())


def test_a_quiet_verify_resume_prints_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(verify_resume, "verify_resume", lambda *_, **__: ["identical"])
    recipe = write_recipe(tmp_path)
    assert call("verify-resume", str(recipe)) == (0, "identical\n")
    assert call("verify-resume", str(recipe), "-q") == (0, "")


def test_verify_resume_names_the_signal_that_ended_a_run(tmp_path, monkeypatch):
    """F95."""
    ended = SimpleNamespace(returncode=-9)
    code, said = verify_here(monkeypatch, tmp_path, lambda *_, **__: ended)
    assert code == 128 + 9 and said.endswith("--name whole: the process was ended by SIGKILL")


@pytest.mark.parametrize(
    ("words", "devices", "batch_size", "sequences"),
    [
        ([], 1, 4, 2),
        ([], 3, 6, 2),
        (["train.micro_batch_tokens=31"], 3, 6, 1),
        (["train.batch_size=3"], 1, 2, 1),
        (["simigrad={target=0.9, min_batch_size=4, max_batch_size=4}"], 1, 4, 2),
    ],
)
def test_a_verified_step_has_two_micro_batches_or_one_a_device(
    tmp_path, words, devices, batch_size, sequences
):
    """4 sequences of 32 tokens, of which 2 fit, become so many; half of them are enough for all."""
    recipe = load_recipe(str(write_recipe(tmp_path)), words)
    cut = verify_resume.cut_recipe(recipe, 2, devices)
    size = cut.train.batch_size, cut.train.micro_batch_tokens
    assert size == (batch_size, 32 * sequences)
    assert cut.data.repeat


def test_a_run_goes_on_after_a_huge_loss(lab):
    """F94: a validation loss of 720, whose perplexity no float holds."""
    huge = """
import torch, efftrain_cli.training.loop as loop
loop.evaluate = lambda *args: torch.tensor(720.0)
"""
    process = lab.train(inject=huge)
    assert "result  val loss 720.0000 nats/token" in process.output


OTHER_PLACE = """
import torch
import efftrain_cli.training.origin as origin
torch.set_num_threads(2)
origin.__version__ = "9.9.9"
"""


def test_another_place_is_recorded_and_said(lab):
    """F68: other threads, PyTorch, efftrain or device: the last bits may differ, so the run and the
    comparison say so."""
    recipe = lab.recipe(extra="[progressive_layer_drop]\ntheta = 0.5\nsteps = 4\n")
    lab.train("r", "--steps", "5", recipe=recipe)
    process = lab.resume("r", "--steps", "8", inject=OTHER_PLACE)
    assert process.errors.count("note: continued with") == 1
    assert (
        "efftrain 0.1.0 -> 9.9.9, threads 1 -> 2: the last bits of the results may differ"
        in process.errors
    )
    (event,) = lab.events("r", "resume")
    assert event["changed"] == ["efftrain 0.1.0 -> 9.9.9", "threads 1 -> 2"]
    notes = load_run(lab.run("r")).notes
    assert notes[-1] == "continued with efftrain 0.1.0 -> 9.9.9, threads 1 -> 2"


BUFFERED = """
from efftrain_cli.training.logbook import Logbook
note = Logbook._note

def as_on_cuda(self, record):
    if record.is_evaluated:
        return note(self, record)
    self._pending.append(record)  # no record is read because time has passed

Logbook._note = as_on_cuda
"""


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_rows_that_were_not_read_yet_are_written_before_a_save(lab, end):
    """On CUDA records are read once a second; a stop and a save that is due read what there is
    first."""
    inject = (
        BUFFERED
        + f"""
import os, signal
from efftrain_cli.data.windows import Windows
batch = Windows.batch

def ending(self, plan, *rest):
    if plan.step == 9:
        os.kill(os.getpid(), signal.{"SIGTERM" if end == "stop" else "SIGKILL"})
    return batch(self, plan, *rest)

Windows.batch = ending
"""
    )
    recipe = lab.recipe()
    text = (
        Path(recipe)
        .read_text()
        .replace("[eval]\nevery = 5", "[eval]\nevery = 100")
        .replace("[checkpoint]\nevery = 5", "[checkpoint]\nevery = 7")
    )
    Path(recipe).write_text(text)
    lab.train(recipe=recipe, inject=inject, code=75 if end == "stop" else -9)
    last = 8 if end == "stop" else 7  # the batch of step 9 is read in step 8
    assert lab.checkpoints("r")[-1] == f"step-{last:08d}"
    assert lab.last_step("r") == last
    lab.resume()
    lab.train_whole(recipe)
    lab.assert_equal_runs("r", "whole", 20)
