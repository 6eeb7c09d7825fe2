"""Branches: runs that begin with the whole state of another run's checkpoint."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.foundation.files import sha256_of
from efftrain_cli.run.reading import load_run
from tests.conftest import cli
from tests.launch import Laboratory

WSD = "optim.schedule=wsd", "optim.decay_share=0.25"


def branch(lab: Laboratory, point: str, line: str = "", **options):
    return lab.call(f"pretrain --no-probe --from {point} {line}", **options)


def test_a_branch_with_its_parents_recipe_is_the_parent(lab):
    """With gradients in flight, amid a warmup."""
    sections = "\n[ouroboros]\nmodules = 2\n[seq_len_warmup]\nstart = 8\nsteps = 15\n"
    lab.train("trunk", recipe=lab.recipe(extra=sections, keep="9"))
    branch(lab, "trunk@10", "--name branch")
    lab.assert_equal_runs("branch", "trunk", 20)


def test_a_run_equals_the_branch_of_a_longer_one_where_its_decay_begins(lab):
    """20 steps of 128 tokens, the last five of which decay; the trunk has 40, and decays from its
    step 31 on. Of the trunk only step 15 is kept besides the newest."""
    recipe = lab.recipe(extra="at = [15]\n", keep="1")
    sets = " ".join(f"--set {each}" for each in WSD)
    lab.train("whole", sets, recipe=recipe)
    lab.train("trunk", f"{sets} --set train.tokens=5120", recipe=recipe)
    assert lab.checkpoints("trunk") == ["step-00000015", "step-00000040"]
    origin = lab.checkpoint("trunk", 15) / "manifest.json"
    digest = sha256_of(origin)
    shorter = "--set train.tokens=2560"
    first, _, _, steps, *_ = branch(lab, "trunk@15", f"{shorter} --plan").output.splitlines()
    assert first == "branch  after step 15: 1,920 tokens"
    assert steps.startswith("steps   16 to 20 of 128 tokens; lr ")
    planned = json.loads(branch(lab, "trunk@15", f"{shorter} --plan --format json").output)
    branch(lab, "trunk@15", f"--name branch {shorter}")
    shutil.rmtree(lab.run("trunk"))
    lab.assert_equal_runs("branch", "whole", 20)
    origin = json.loads((lab.run("branch") / "origin.json").read_text())
    assert origin["branch"] == {"parent": "trunk", "step": 15, "sha256": digest}
    # The path has 20 equal steps, and five of them are its own.
    facts = load_run(lab.run("branch")).facts
    assert facts["FLOPs of the branch"] == pytest.approx(facts["FLOPs"] / 4)
    assert planned["flops"] == pytest.approx(facts["FLOPs of the branch"])
    assert (planned["steps"], planned["tokens"]) == (20, 2560)
    assert "of trunk at step 15" in cli("runs show branch").output


def test_a_branch_switches_methods_and_says_how_the_rate_jumps(lab):
    lab.train("trunk", "--set checkpoint.keep=9 --set ouroboros.modules=2")
    sets = "--set seq_len_warmup={start=8,steps=12} --set optim.lr=1e-2 --set ouroboros.modules=1"
    said = branch(lab, "trunk@10", f"--name b --set train.batch_size=8 {sets}")
    assert "jumps from" in said.output + said.errors
    assert "[ouroboros] has changed" in said.output + said.errors
    rows = lab.rows("b")
    assert rows[:11] == lab.rows("trunk")[:11]
    assert rows[11]["batch_size"] == 8
    assert rows[11]["seq_len"] < 32
    assert not (lab.checkpoint("b", 10) / "method.safetensors").exists()


REFUSED = [
    ("trunk", "", "--from 'trunk' is no run and step"),
    ("trunk@7", "", "run trunk has no checkpoint of step 7, only of 15, 20"),
    ("trunk@15", "--set model.n_embd=32", "model.n_embd: 64 -> 32"),
    ("trunk@15", "--set optim.name=lion", "optim.name: 'adamw' -> 'lion'"),
    ("trunk@15", "--seed 7", "seed: 1234 -> 7"),
    ("trunk@15", "--set data.tokenizer=bpe:310", "another tokenizer"),
    ("trunk@15", "--set train.tokens=1920", "trained 1,920 tokens"),
]


def test_what_no_branch_can_be_is_refused_and_leaves_nothing(lab):
    lab.train("trunk")
    for point, line, message in REFUSED:
        with pytest.raises(UsageError, match=re.escape(message)):
            cli(f"pretrain --no-probe --from {point} {line}")
    assert [path.name for path in (lab.folder / "runs").iterdir()] == ["trunk"]
