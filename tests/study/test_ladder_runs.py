"""A real ladder at toy length, killed and continued: what was planned is what is spent."""

from __future__ import annotations

import json
import re
import signal

import pytest

from efftrain_cli.run.reading import load_run
from efftrain_cli.study.plans import read_study
from efftrain_cli.study.sizes import flops_of
from tests.conftest import REPOSITORY

PAGE = (REPOSITORY / "docs" / "studies" / "ladder.toml").read_text()


def toy(text: str) -> str:
    """The file of the page with two seeds and budgets, a hundredth of the tokens, on made text."""
    text = re.sub(r'tokens = "(\d+)0K"', lambda match: f"tokens = {100 * int(match[1])}", text)
    data = '"data.train=text.txt", "data.valid_fraction=0.05", "eval.windows=4"'
    steps = '"model.seq_len=16", "train.batch_size=2", "optim.warmup_steps=1"'
    size = f"set = [{data}, {steps}]"
    text = text.replace("branches = [0.5, 1, 2]", "branches = [1, 2]")
    text = text.replace('"10..12"', '"10..11"').replace("bpe:512", "bpe:300")
    return re.sub(r"(tokens = \d+)", rf"\1\n{size}", text)


@pytest.mark.slow
def test_the_study_of_the_page_is_killed_and_goes_on_and_costs_what_was_planned(lab, monkeypatch):
    monkeypatch.chdir(lab.folder)
    (lab.folder / "ladder.toml").write_text(toy(PAGE))
    trials = read_study(lab.folder / "ladder.toml").trials(2)
    planned = flops_of(trials)
    runs = lab.folder / "runs"
    process = lab.start("study", "ladder.toml", "--jobs", "2")
    process.wait_for(lambda: len(list(runs.glob("ladder-*-trunk-*"))) > 5)
    process.kill(signal.SIGKILL)
    process.wait()
    trained = lab.call("study ladder.toml --jobs 2 --format json", timeout=600).output
    gains = json.loads(trained)["gains"]
    assert [gain["seeds"] for gain in gains] == [2] * 4
    spent = 0.0
    for trial in trials:
        facts = load_run(runs / trial.name).facts
        spent += facts.get("FLOPs of the branch", facts["FLOPs"])
    assert spent == pytest.approx(planned, rel=0.1)
    # Nothing is trained twice.
    again = lab.call("study ladder.toml --jobs 2", timeout=100)
    assert "to train" not in again.output + again.errors
