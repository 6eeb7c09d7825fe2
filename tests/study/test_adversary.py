"""By commands alone, seeds are added or dropped, studies renamed, targets picked: every claim is
labelled."""

from __future__ import annotations

import html
import json
from pathlib import Path

import pytest

import efftrain_cli
from efftrain_cli.compare.sisters import is_alike
from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.run.directory import run_names, run_path, runs_root
from efftrain_cli.study.load import read_study
from efftrain_cli.study.records import read_looks, study_folder
from efftrain_cli.study.registration import check_registered, register
from efftrain_cli.sweep import compare_trials
from efftrain_cli.trials.trial import grid
from tests.conftest import invoke
from tests.fake_runs import write_run
from tests.study.conftest import STUDY, conduct_stubs, write_study
from tests.trials.stubs import write_trial

SLW = "\n[seq_len_warmup]\nstart = 8\nsteps = 10\n"


def again(folder: Path, *changes: tuple[str, str], name: str = "again") -> list[str]:
    """Why a study of another name, with these changes of the first one's text, is exploratory."""
    return register(write_study(folder, *changes, name=name), allow=False).exploratory


LOOKED = ("looks = 2", 'looks = 2\nset = ["eval.every=4"]')
PICKED = ('measure = "final_loss"', 'measure = "tokens_to_target"\ntarget = 3.1')


@pytest.mark.parametrize(
    "changes",
    [
        [('"different"', '"better"')],
        [LOOKED, ('"different"', '"better"')],
        [PICKED],
        [('"10..14"', '"12..20"'), ('"0..1"', '"2..3"')],
        [('baseline = "plain"', 'baseline = "warm"')],
    ],
)
def test_seen_seeds_are_labelled_whatever_else_changes(folder, conducted, changes):
    reasons = again(folder, *changes)
    assert any("were seen by study 'study'" in reason for reason in reasons), reasons


def test_removed_runs_were_seen(folder, conducted):
    """The runs are gone, and the study stands in another folder's name: their recipes are kept."""
    names = run_names()
    assert invoke("runs", "rm", *names, "--yes").exit_code == 0 and run_names() == []
    refused = invoke("runs", "rm", "study-study", "--yes")
    assert isinstance(refused.exception, UsageError)
    assert str(refused.exception).startswith("study-study: the registration of a study is not")
    assert any("6 earlier runs with an arm's recipe" in reason for reason in again(folder))


def test_runs_that_were_removed_before_a_registration_are_labelled(conducted):
    """As the message about runs without a registration advises: remove them, and register."""
    (runs_root() / "study-study" / "plan.json").unlink()
    with pytest.raises(UsageError, match="remove them"):
        register(conducted.file, allow=False)
    assert invoke("runs", "rm", "study-*", "--yes").exit_code == 0
    (reason,) = register(conducted.file, allow=False).exploratory
    assert reason.startswith("6 earlier runs with an arm's recipe and a seed of the study")


FIXED = [('[tuning]\nseeds = "0..1"\ngrid = { "optim.lr" = [1e-3, 2e-3, 4e-3] }\n', "")]
"""Without tuning, so that no key may differ."""
RATES = ('"final_loss"', '"lr_sensitivity"\nrates = [1e-3, 2e-3, 3e-3, 4e-3, 5e-3]')


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        (["optim.lr=5e-3"], [*FIXED, RATES]),
        (["train.activation_checkpointing=true", "parallel.check_every=2"], FIXED),
        (["data.train=./text.txt"], FIXED),
        (["train.tokens=5120"], FIXED),
    ],
    ids=["a rate that is judged over", "other memory", "the same text", "a longer run"],
)
def test_a_run_that_shows_what_a_run_of_the_study_would_is_labelled(folder, settings, changes):
    recipe = folder / "plain.toml"
    recipe.write_text(recipe.read_text().replace("lr = 1e-3", 'lr = 1e-3\nschedule = "constant"'))
    texts = [(key, [value]) for key, _, value in (text.partition("=") for text in settings)]
    (trial,) = grid(["plain.toml"], (12,), texts)
    write_trial(trial)
    (reason,) = again(folder, *changes)
    assert reason == (
        f"1 earlier run with an arm's recipe and a seed of the study, {trial.name} for one"
    )


def test_probes_of_a_warmup_on_the_study_s_seeds_are_labelled(folder):
    (trial,) = grid(["plain.toml"], (12,), [])
    write_trial(trial)
    probes = runs_root() / "plain-tune" / "probes"
    probes.mkdir(parents=True)
    run_path(trial.name).rename(probes / "start8-steps10-seed12")
    (reason,) = again(folder, *FIXED)
    assert reason.endswith("a seed of the study, plain-tune/probes/start8-steps10-seed12 for one")


def test_a_run_that_is_removed_and_trained_again_is_labelled(conducted):
    """As after a result that did not please: another device may give another one."""
    assert invoke("runs", "rm", "study-warm-seed11", "--yes").exit_code == 0
    state = conduct_stubs(conducted.file)
    (look,) = read_looks(study_folder("study"))
    assert (look["outcome"], look["exploratory"]) == ("better", "true")
    assert state.look == 1 and run_path("study-warm-seed11").is_dir()
    out = invoke("compare", "--study", "study.toml").stdout
    claim, _, _ = out.partition("warm: ")
    assert "EXPLORATORY: no verdict below is a confirmation" in claim
    assert "1 run of it, such as study-warm-seed11, removed after its registration" in claim


def test_asking_again_on_fresh_seeds_names_the_earlier_verdict(folder, conducted):
    fresh = [('"10..14"', '"20..24"'), ('"0..1"', '"2..3"')]
    warm = 'set = ["seq_len_warmup.start=16"]\n'
    third = '\n[[arms]]\nname = "third"\nrecipe = "plain.toml"\nset = ["optim.lr=1e-4"]\n'
    cases = {
        "asked": fresh,
        "evaluated": [*fresh, LOOKED],
        "armed": [*fresh, (warm, warm + third)],
        "targeted": [*fresh, ('"different"', '"better"')],
        "measured": [*fresh, ('"final_loss"', '"tokens_to_target"')],
    }
    for name, changes in cases.items():
        reasons = [reason for reason in again(folder, *changes, name=name) if "'study'" in reason]
        (reason,) = reasons
        assert reason.endswith("asked the same of the same arms: warm better in final_loss")


@pytest.mark.parametrize(
    ("key", "before", "after", "alike"),
    [
        ("optim.lr", 1e-3, 1.04e-3, True),
        ("optim.lr", 1e-3, 1.06e-3, False),
        ("eval.every", 5, 50, True),
        ("train.micro_batch_tokens", 512, 1024, True),
        ("train.batch_size", 8, 16, False),
        ("optim.name", "adamw", "lion", False),
        ("optim.lr", None, 1e-3, False),
    ],
)
def test_a_recipe_with_a_trifle_changed_is_the_one_that_was_seen(key, before, after, alike):
    first = {"model.n_layer": 2, "seed": 1} | ({} if before is None else {key: before})
    second = {"model.n_layer": 2, "seed": 2, key: after}
    assert is_alike(first, second) == is_alike(second, first) == alike
    assert is_alike(first, second, [key])


def test_an_allowed_change_is_labelled_wherever_the_verdict_is_printed(folder, conducted):
    path = folder / "study.toml"
    path.write_text(STUDY.replace('"different"', '"better"'))
    for words in (["study", "study.toml"], ["compare", "--study", "study.toml"]):
        refused = invoke(*words)
        assert isinstance(refused.exception, UsageError), words
        assert "was changed since" in str(refused.exception)
    out = invoke("compare", "--study", "study.toml", "--allow").stdout
    claim, _, _ = out.partition("warm: ")
    assert "EXPLORATORY: no verdict below is a confirmation" in claim
    whole = invoke("compare", "--study", "study.toml", "--allow", "--format", "json").stdout
    assert "it was changed after its registration" in json.loads(whole)["study"]["exploratory"][0]
    assert check_registered(read_study(path), allow=True).exploratory


@pytest.mark.parametrize("form", ["markdown", "latex", "html", "json"])
def test_a_document_about_a_study_has_all_that_is_said_of_its_verdict(folder, form):
    state = conduct_stubs(write_study(folder, ("looks = 2", "looks = 2\nalpha = 0.3")))
    assert state.decided
    path = folder / "study.toml"
    path.write_text(path.read_text().replace('"different"', '"better"'))
    words = ["--study", "study.toml", "--allow", "--format", form, "--output", "out"]
    assert invoke("compare", *words).exit_code == 0
    text = html.unescape((folder / "out").read_text())
    for said in (
        "The verdicts of study study: warm better in final_loss",
        "study study is exploratory: it was changed after its registration",
        "study study: each arm was tuned on 2 seeds: identical methods",
        "study study: arm 'plain': the best optim.lr, 0.001, is the lowest tried",
        "study study: alpha = 0.3: 30 % of studies without a difference show one",
    ):
        assert said in text, said


@pytest.mark.parametrize(
    "form",
    ["table", "markdown", "latex", "csv", "json", pytest.param("html", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    ("words", "label"),
    [
        (["small", "slw"], "left out"),
        (["small", "slw", "--target-loss", "3.5"], "the target loss was chosen now"),
        (["small", "slw", "--margin", "0.5"], "the margin was chosen now"),
        (["small", "slw", "--equal", "flops"], "what is equal was chosen now"),
        (["small-seed0", "small-seed1", "slw"], "runs left out or removed: 1 of small"),
        (["small", "slw", "copy", "--allow"], "a newer run of the same recipe and seed is taken"),
    ],
)
def test_every_format_of_a_claim_has_its_label(tmp_path, monkeypatch, form, words, label):
    monkeypatch.setenv("EFFTRAIN_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    for seed in range(3):
        write_run(tmp_path / "runs", "small", seed)
        write_run(tmp_path / "runs", "slw", seed, speed=1.3, more=SLW)
    if "copy" in words:
        later = {"recipe": "slw", "started": "2027-01-01T00:00:00+00:00"}
        write_run(tmp_path / "runs", "slw", 0, name="copy", speed=2.0, more=SLW, origin=later)
    done = invoke("compare", *words, "--format", form, "--output", "out")
    assert done.exit_code == 0, (done.output, done.exception)
    text = (tmp_path / "out").read_text()
    assert "better" in text
    if form == "csv":
        # A column cannot hold a sentence: it says that the claim is exploratory, in every row.
        assert {line.rsplit(",", 1)[1] for line in text.splitlines()} == {"exploratory", "true"}
        return
    assert "Exploratory: nothing was fixed before the runs" in text
    if form == "latex":
        # A comment is not printed: the caption of every table with verdicts says it too.
        for table in text.split("\\begin{table}")[1:]:
            assert ("Exploratory: " in table) == ("& verdict" in table)
    if label != "left out":
        assert label in text


def test_a_baseline_at_a_bad_setting_is_said():
    for seed in range(3):
        for lr, speed in ((1e-3, 1.0), (4e-3, 1.3)):
            names = [f"{recipe}-lr{lr}-seed{seed}" for recipe in ("small", "slw")]
            write_run(runs_root(), "small", seed, name=names[0], lr=lr, speed=speed)
            write_run(runs_root(), "slw", seed, name=names[1], lr=lr, speed=speed, more=SLW)
    said = "the baseline is at a setting that is not its best"
    for words, is_said in (([], False), (["--baseline", "small-lr0.001-seed0"], True)):
        whole = json.loads(invoke("compare", "small", "slw", *words, "--format", "json").stdout)
        assert (said in whole["caveat"]) == is_said
        chosen = [each["label"] for each in whole["settings_tried"] if each["chosen"]]
        assert chosen == [group["label"] for group in whole["groups"]]


LEFT_OUT = "runs left out or removed: "


def caveat_of(*words: str) -> str:
    return json.loads(invoke("compare", *words, "--format", "json").stdout)["caveat"]


def test_seeds_that_were_dropped_are_counted(tmp_path):
    """By naming paths of another folder, by another name of the recipe, by removing runs."""
    for root in (runs_root(), tmp_path / "other"):
        for seed in range(5):
            write_run(root, "small", seed)
            write_run(root, "slw", seed, speed=1.3 if seed < 3 else 0.7, more=SLW)
    assert LEFT_OUT not in caveat_of("small", "slw")
    names = ("small-seed0", "small-seed1", "slw-seed0", "slw-seed1")
    paths = [str(tmp_path / "other" / name) for name in names]
    assert f"{LEFT_OUT}3 of slw, 3 of small" in caveat_of(*paths)

    write_run(runs_root(), "renamed", 5, speed=0.7, more=SLW)
    assert f"{LEFT_OUT}1 of slw" in caveat_of("small", "slw")
    assert invoke("runs", "rm", "*-seed[345]", "--yes").exit_code == 0
    assert f"{LEFT_OUT}3 of slw, 2 of small" in caveat_of("small", "slw")
    frame = efftrain_cli.comparison("small", "slw")
    assert f"{LEFT_OUT}3 of slw, 2 of small" in frame.attrs["caveat"]
    assert frame.attrs["labels"] == []


def test_a_sweep_of_fewer_seeds_counts_the_others(folder):
    trials = grid(["plain.toml", "warm.toml"], range(5), [])
    for trial in trials:
        write_trial(trial)
    few = [trial for trial in trials if trial.seed < 3]
    found = compare_trials(few, baseline=None, target_loss=None, allow=False)
    assert f"{LEFT_OUT}2 of plain, 2 of warm" in found.caveat
