"""A study from its first run to its verdict, with stubs that train: phases, looks, stops, changes,
receipts, rehearsal."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace

import pytest

from efftrain_cli.foundation.errors import DataError, StoppedError, UsageError
from efftrain_cli.plan.preview import summarize_plan
from efftrain_cli.recipe.draft import recipe_names
from efftrain_cli.recipe.recipe import load_recipe
from efftrain_cli.run.directory import run_path, runs_root
from efftrain_cli.run.rates import Rate, digest_of_training, remember_rate
from efftrain_cli.study import main
from efftrain_cli.study.file import StudyFile
from efftrain_cli.study.judge import StudyState, judge_runs
from efftrain_cli.study.load import read_study
from efftrain_cli.study.main import conduct
from efftrain_cli.study.phases import all_trials, expected_lowest, read_costs, with_tuning
from efftrain_cli.study.records import Plan, study_folder
from efftrain_cli.study.registration import check_registered, register
from efftrain_cli.study.rehearse import STEPS, rehearsal, toy_recipe, toy_study
from efftrain_cli.study.text import as_json, plan_lines, verdict_lines
from efftrain_cli.trials.costs import total_of
from efftrain_cli.trials.runner import TrialRunner
from efftrain_cli.verify_resume import cut_recipe
from tests.conftest import invoke
from tests.fake_runs import write_run
from tests.study.conftest import (
    STUDY,
    choose,
    conduct_stubs,
    launcher,
    make_runner,
    write_study,
)
from tests.trials.stubs import Pretrain, quiet, write_trial


def judged(file: StudyFile, allow: bool) -> tuple[StudyState, Plan]:
    """The verdicts of the runs there are, and the registration."""
    registration = check_registered(file, allow)
    return judge_runs(with_tuning(file), allow), registration


def test_tuning_then_looks_until_all_is_decided(file):
    register(file, allow=False)
    launch = launcher(file)
    told = []
    found = conduct(
        file, make_runner(file, launch), tell=lambda judgement: told.append(judgement.look)
    )
    # the stubs' losses do not depend on the learning rate: the first of equals is taken
    assert {tuned.arm: tuned.settings for tuned in found.file.tuned} == {
        "plain": ("optim.lr=0.001",),
        "warm": ("optim.lr=0.001",),
    }
    assert launch.calls[:2] == ["study-plain-lr0.001-tune-seed0", "study-plain-lr0.002-tune-seed0"]
    assert launch.calls[12:] == [
        f"study-{arm}-seed{seed}" for seed in (10, 11, 12) for arm in ("plain", "warm")
    ]
    assert (found.look, found.decided, told) == (
        1,
        True,
        [1],
    )  # warm is much better here, so three seeds do
    assert found.verdicts[0].outcome == "better" and found.verdicts[0].seeds == (10, 11, 12)


def test_a_stopped_study_continues_and_trains_nothing_twice(file):
    register(file, allow=False)
    first = launcher(file, {"study-warm-seed11": 75})
    with pytest.raises(StoppedError):
        conduct(file, make_runner(file, first))
    second = launcher(file)
    conduct(file, make_runner(file, second))
    assert second.calls == ["resume study-warm-seed11", "study-plain-seed12", "study-warm-seed12"]
    third = launcher(file)
    conduct(file, make_runner(file, third))
    assert third.calls == []


def test_receipts_and_looks(file):
    conduct_stubs(file, {"study-plain-lr0.004-tune-seed1": 4})
    rows = list(csv.DictReader((study_folder("study") / "receipts.csv").open()))
    assert [row["phase"] for row in rows] == ["tuning"] * 12 + ["confirmation"] * 6
    failed = next(row for row in rows if row["run"] == "study-plain-lr0.004-tune-seed1")
    assert (failed["status"], failed["final_loss"]) == ("diverged", "")
    judged_row = next(row for row in rows if row["run"] == "study-warm-seed10")
    assert (
        judged_row["settings"] == "seq_len_warmup.start=16 optim.lr=0.001"
        and float(judged_row["final_loss"]) > 3
    )
    (look,) = csv.DictReader((study_folder("study") / "looks.csv").open())
    assert (look["look"], look["seeds"], look["arm"], look["outcome"]) == (
        "1",
        "3",
        "warm",
        "better",
    )
    assert look["exploratory"] == "false"


def test_what_compare_refuses_has_no_verdict(conducted):
    file = conducted.file
    path = run_path("study-warm-seed11") / "origin.json"
    path.write_text(path.read_text().replace("b" * 64, "e" * 64))  # the hash of the validation text
    with pytest.raises(UsageError, match="the validation text differs") as error:
        judged(file, False)
    assert error.value.exit_code == 2
    refused = invoke("compare", "--study", "study.toml")
    assert refused.exit_code != 0 and "better than" not in refused.stdout
    judgement, registration = judged(file, True)
    assert judgement.verdicts[0].outcome == "undecided" and judgement.verdicts[0].p == 1.0
    text = "\n".join(verdict_lines(judgement, registration))
    assert text.startswith("EXPLORATORY") and "the validation text differs" in text
    assert "warm against plain in final loss: not judged: these losses are not comparable." in text


def test_runs_under_a_study_s_name_with_another_recipe_or_seed_are_refused(conducted):
    file = conducted.file
    recipe = run_path("study-warm-seed11") / "recipe.toml"
    before = recipe.read_text()
    for old, new, key in (
        ("seed = 11", "seed = 12", "seed"),
        ("n_embd = 32", "n_embd = 64", "model.n_embd"),
    ):
        assert old in before
        recipe.write_text(before.replace(old, new))
        with pytest.raises(
            UsageError, match=rf"study-warm-seed11' exists with another recipe \({key} differ"
        ):
            judged(file, False)
    recipe.write_text(before)
    judged(file, False)


def test_marks_of_runs_stand_beside_the_verdict(conducted):
    file = conducted.file
    events = run_path("study-warm-seed11") / "events.jsonl"
    with events.open("a") as out:
        out.write(json.dumps({"event": "override", "differences": [["threads", 1, 2]]}) + "\n")
    judgement, registration = judged(file, False)
    text = "\n".join(verdict_lines(judgement, registration))
    assert (
        "warning: study-warm-seed11: continued although what decides it had changed (threads)"
        in text
    )


@pytest.mark.parametrize(
    ("grid", "chosen", "warning"),
    [
        ("{}", {}, "not tuned while others are"),
        ('{ "optim.lr" = [2e-3] }', {"plain": "0.002"}, "tuned over 1 setting and another over 3"),
    ],
)
def test_warnings_of_an_edge_and_of_an_arm_that_is_tuned_less(folder, grid, chosen, warning):
    plain = 'recipe = "plain.toml"'
    file = write_study(folder, (plain, f"{plain}\ngrid = {grid}"))
    register(file, allow=False)
    launch = Pretrain([each.trial for each in all_trials(choose(file, warm="0.001", **chosen))])
    untuned, warm = conduct(file, make_runner(file, launch)).file.tuned
    assert warning in untuned.warnings[0] and len(untuned.tried) == len(untuned.settings)
    assert "0.001, is the lowest tried; a lower one" in warm.warnings[0]


# --- what was fixed beforehand --------------------------------------------------------------------


BETTER = ('"different"', '"better"')
ONE_LOOK = ("looks = 2", "looks = 1")


def test_a_changed_study_is_refused_with_what_changed(folder, conducted):
    changed = write_study(folder, BETTER)
    for ask in (lambda: register(changed, False), lambda: judged(changed, False)):
        with pytest.raises(
            UsageError, match=r'primary\.0\.direction was "different", is "better"'
        ) as error:
            ask()
        assert error.value.exit_code == 2 and "--allow" in str(error.value)
    assert judged(changed, True)[1].exploratory  # shown, and not written down
    ours = conducted.file.sha256[:16]
    assert any(
        line.endswith(f"the registered one is {ours}") for line in plan_lines(changed, [], 1)
    )


def test_an_allowed_change_is_exploratory_for_good(folder, file):
    register(file, allow=False)
    changed = write_study(folder, ONE_LOOK)
    (reason,) = register(changed, allow=True).exploratory
    assert "looks was 2, is 1" in reason
    assert register(changed, allow=False).exploratory == [reason]
    with pytest.raises(
        UsageError,
        match=r"since --allow accepted a change on [^:]*:.*: looks was 1, is 2\n  restore",
    ):
        register(write_study(folder), allow=False)  # back again: that was another change
    assert register(write_study(folder, ONE_LOOK), allow=False).exploratory == [
        reason
    ]  # as advised


def test_a_changed_recipe_is_a_changed_study(folder, file):
    register(file, allow=False)
    (folder / "plain.toml").write_text(
        (folder / "plain.toml").read_text().replace("lr = 1e-3", "lr = 5e-4")
    )
    with pytest.raises(UsageError, match=r"recipe of plain: optim\.lr was 0\.001, is 0\.0005"):
        register(read_study(file.path), allow=False)


def test_runs_from_before_the_registration_make_it_exploratory(file):
    write_trial(all_trials(file)[-1].trial)
    with pytest.raises(UsageError, match="1 run of study 'study' exist already"):
        register(file, allow=False)
    assert not (study_folder("study") / "plan.json").exists()
    assert register(file, allow=True).exploratory == [
        "it was registered after 1 run of it had begun",
    ]
    assert check_registered(file, allow=False).exploratory


def test_arms_with_other_tokens_need_an_equal_budget(folder):
    tokens = ('"seq_len_warmup.start=16"', '"seq_len_warmup.start=16", "train.tokens=9_000"')
    with pytest.raises(
        UsageError, match=r"different tokens: plain 2,560, warm 9,000\n  say what they have"
    ):
        register(write_study(folder, tokens), allow=False)
    equal = ("looks = 2", 'looks = 2\nequal = "flops"')
    register(write_study(folder, tokens, equal), allow=False)


def test_a_new_name_does_not_hide_seen_seeds(folder, conducted):
    """The same arms on the same seeds under another name: what the first study found stands above
    the second."""
    renamed = write_study(folder, BETTER, name="again")
    seeds, asked, runs = register(renamed, allow=False).exploratory
    assert seeds == "seeds 10, 11, 12, 13, 14 of plain, warm were seen by study 'study'"
    assert asked.startswith("study 'study', registered ")
    assert asked.endswith("asked the same of the same arms: warm better in final_loss")
    assert runs.startswith("6 earlier runs with an arm's recipe and a seed of the study, ")
    rates = '"lr_sensitivity"\nrates = [1e-3, 2e-3, 3e-3, 4e-3, 5e-3]'
    changes = [('"10..14"', '"20..24"'), ('"final_loss"', rates)]
    assert register(write_study(folder, *changes, name="fresh"), allow=False).exploratory == []


@pytest.mark.parametrize(
    ("looks", "verdicts"),
    [
        (b"run,seed,final_loss\nk1,10,3.5\n", "looks.csv is damaged: it is not a table of looks"),
        (b"look,arm,outcome,measure\n1,warm\n", "looks.csv is damaged: it is not a table of looks"),
        (b"\xff\xfe", "looks.csv is damaged: it is not UTF-8 text (byte 0)"),
        (b"", "no look yet"),
    ],
)
def test_a_foreign_looks_csv_does_not_stop_a_registration(folder, file, looks, verdicts):
    register(file, allow=False)
    (study_folder("study") / "looks.csv").write_bytes(looks)
    reason = register(write_study(folder, name="again"), allow=False).exploratory[-1]
    assert "asked the same of the same arms: " in reason and reason.endswith(verdicts)


def test_a_finished_study_writes_its_last_look_again(conducted):
    """As a damaged looks.csv advises: delete it, and give the command again."""
    path = study_folder("study") / "looks.csv"
    before = path.read_text()
    path.unlink()
    conduct_stubs(conducted.file)
    assert path.read_text() == before


def test_a_tuning_run_with_another_recipe_is_refused(file):
    conduct_stubs(file)
    recipe = run_path("study-plain-lr0.002-tune-seed0") / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("n_embd = 32", "n_embd = 64"))
    with pytest.raises(
        UsageError, match=r"lr0\.002-tune-seed0' exists with another recipe \(model\.n_embd differ"
    ):
        read_study(file.path)


def test_a_study_with_a_foreign_looks_csv_says_how_to_mend_it(file):
    register(file, allow=False)
    (study_folder("study") / "looks.csv").write_text("look,seeds\none,3\n")
    with pytest.raises(DataError, match=r"not a table of looks\n  delete it"):
        conduct(file, make_runner(file, launcher(file)))
    (study_folder("study") / "looks.csv").unlink()
    assert conduct(file, make_runner(file, launcher(file))).look == 1


@pytest.mark.parametrize("text", ["{", '{"a": 1}', '{"schema_version": 99}'])
def test_other_damaged_files_do_not_stop_a_registration(file, text):
    """What nobody can read any more may have seen the seeds: a plan says so, a run is left out."""
    (runs_root() / "other-study").mkdir(parents=True)
    (runs_root() / "other-study" / "plan.json").write_text(text)
    (write_run(runs_root(), "other", 10) / "recipe.toml").write_bytes(b"\xff\xfe\x00")
    (reason,) = register(file, allow=False).exploratory
    assert reason.startswith("which seeds an earlier study saw is unknown: ")
    assert "other-study/plan.json" in reason and "\n" not in reason


def test_costs_to_one_loss_are_one_comparison(folder):
    """As Holm's correction counts them: the final loss, two costs to 3.0 and one to 2.5 are
    three."""
    primaries = ('tokens_to_target"\ntarget = 3.0', 'flops_to_target"\ntarget = 3.0')
    changes = []
    for primary in (*primaries, 'tokens_to_target"\ntarget = 2.5'):
        more = f'[[primary]]\nmeasure = "{primary}\ndirection = "better"\n\n[tuning]'
        changes.append(("[tuning]", more))
    assert write_study(folder, *changes).comparisons == 3


def test_runs_that_the_registration_did_not_start_are_labelled(file):
    registration = register(file, allow=False)
    launch = launcher(file)
    runner = TrialRunner(
        study_folder(file.name), say=quiet, launch=launch, study=registration.sha256
    )
    judgement = conduct(file, runner)
    assert {each["EFFTRAIN_STUDY"] for each in launch.environments} == {registration.sha256}
    (tuning,) = [label.text for label in judgement.labels if "tuned" in label.text]
    assert (
        tuning
        == "each arm was tuned on 2 seeds: identical methods, each tuned on 1, differ in 7 to 19 %"
        " of studies of 3 to 10 seeds"
    )
    # The stubs write origins without it.
    (label,) = [label for label in judgement.labels if "registration" in label.text]
    assert label.text.startswith("6 runs without its registration, such as study-")


@pytest.mark.parametrize(
    ("seeds", "simulated", "errors"),
    [(3, 3, "6 to 13 %"), (4, 3, "6 to 13 %"), (5, 5, "6 to 9 %")],
)
def test_the_error_that_tuning_adds_is_said(folder, seeds, simulated, errors):
    """As the nearest simulation of as many seeds or fewer found."""
    file = write_study(folder, ('seeds = "0..1"', f'seeds = "0..{seeds - 1}"'))
    (label,) = judge_runs(file, allow=False).labels
    assert (
        label.text
        == f"each arm was tuned on {seeds} seeds: identical methods, each tuned on {simulated},"
        f" differ in {errors} of studies of 3 to 10 seeds"
    )


def test_more_tuning_seeds_than_were_simulated_are_not_warned_of(folder):
    file = write_study(folder, ('seeds = "0..1"', 'seeds = "0..5"'))
    assert judge_runs(file, allow=False).labels == ()


def test_an_edited_plan_is_found(file):
    register(file, allow=False)
    path = study_folder("study") / "plan.json"
    plan = json.loads(path.read_text())
    plan["values"]["alpha"] = 0.5
    path.write_text(json.dumps(plan))
    with pytest.raises(DataError, match="was edited"):
        register(file, allow=False)
    path.write_text("{")
    with pytest.raises(DataError, match="damaged"):
        register(file, allow=False)


def test_a_study_without_runs_has_no_verdict(file):
    with pytest.raises(UsageError, match="has no run yet"):
        judged(file, False)
    register(file, allow=False)
    judgement, registration = judged(file, False)
    assert judgement.look == 0 and len(judgement.pending) == 6 and not registration.exploratory
    (line,) = verdict_lines(judgement, registration)
    assert line.endswith("with 6 runs still to end, such as plain seed 10.")
    (line,) = verdict_lines(replace(judgement, pending=("warm seed 12",)), registration)
    assert line.endswith("with 1 run still to end, such as warm seed 12.")


# --- what it costs, and the rehearsal -------------------------------------------------------------


def test_the_plan_counts_what_is_left(file):
    total = total_of(read_costs(file))
    assert (total["runs"], total["done"], total["tokens_left"]) == (22, 0, 22 * 2560)
    assert total["seconds_left"] is None
    file = conduct_stubs(file).file
    recipe = load_recipe("plain.toml")
    remember_rate(
        Rate(
            device="cpu",
            device_kind="cpu",
            source="run plain",
            n_layer=1,
            n_embd=32,
            flops_per_second=1.0,
            flops_per_token=1.0,
            trained=digest_of_training(recipe),
            tokens_per_second=512.0,
        )
    )
    total = total_of(read_costs(file))
    assert total["runs"] - total["done"] == 4 and total["tokens_left"] == 4 * 2560
    # 2,560 tokens at 512 a second, 5 s to start.
    assert total["seconds_left"] == pytest.approx(4 * (5 + 5))


def test_runs_whose_names_hash_what_tuning_chose_are_counted(folder):
    """34 letters, "-plain-lr0.0012345678901234-seed10" and a hash in place of what is beyond 64
    characters."""
    measure = '"lr_sensitivity"\nrates = [1.2345678901234e-3, 2.2345678901234e-3]'
    changes = [('"final_loss"', measure), ("looks = 2", "looks = 1")]
    file = conduct_stubs(write_study(folder, *changes, name="s" * 34)).file
    costs = read_costs(read_study(file.path))
    assert "0012" not in costs[-1]["name"] and len(costs[-1]["name"]) <= 64
    assert total_of(costs)["done"] == len(costs) == 12 + 5 * 2 * 2


def test_json_has_null_where_no_run_of_a_seed_has_begun(folder):
    changes = [('"final_loss"', '"lr_sensitivity"\nrates = [1e-3, 4e-3]'), ("looks = 2", "")]
    state = judge_runs(write_study(folder, *changes), allow=False)
    (curve, _) = json.loads(json.dumps(as_json(state, None), allow_nan=False))["sensitivity"]
    assert curve["initial"] == [None] * 5


@pytest.mark.parametrize("name", recipe_names())
def test_every_shipped_recipe_can_be_made_a_toy(name, tmp_path):
    recipe = load_recipe(name)
    toy = toy_recipe(recipe, tmp_path)
    plan = summarize_plan(toy, None, 320)
    assert STEPS - 1 <= plan.steps <= 2 * STEPS and plan.tokens < 4000
    assert toy.methods.keys() == recipe.methods.keys() and len(toy.stages) == len(recipe.stages)


def test_a_rehearsal_keeps_kinds_and_makes_everything_else_small(folder, file):
    small = toy_study(file, folder)
    assert (small.seeds, small.looks, small.tuning_seeds) == ((10, 11, 12, 13), (3, 4), (0,))
    assert small.study.arms[1].grid == {"optim.lr": (0.001, 0.004)}
    warm = load_recipe(small.study.arms[1].recipe)
    # Its sequences are of 32 tokens already.
    assert warm.seq_len_warmup.start == 16 and warm.train.tokens == STEPS * 4 * 32


@pytest.mark.parametrize(
    "recipe",
    [
        ("unstable", ["batch_size_warmup={start = 16, increment = 16, sequences = 1571}"]),
        ("small-simigrad", []),
        ("small-pld", []),
    ],
)
def test_what_several_devices_share_is_rehearsed_and_verified_on_them(recipe, tmp_path):
    """Each of eight devices has a sequence of the smallest step."""
    recipe = load_recipe(*recipe)
    for short in (toy_recipe(recipe, tmp_path, 8), cut_recipe(recipe, 4, 8)):
        smallest = min(
            (m.batch_bounds(short.train.batch_size)[0] for m in short.methods.values()),
            default=short.train.batch_size,
        )
        assert smallest >= 8


def test_an_arm_may_have_the_name_of_its_study(folder):
    file = write_study(folder, ('name = "warm"', 'name = "study"'))
    small = toy_study(file, folder / "rehearsal")
    assert load_recipe(small.study.arms[1].recipe).seq_len_warmup is not None


def test_a_rehearsal_goes_through_all_phases_and_leaves_the_study_alone(folder, file):
    with rehearsal(file, study_folder(file.name) / "rehearsal") as small:
        register(small, allow=False)
        launch = launcher(small)
        found = conduct(small, make_runner(small, launch))
    assert found.look and launch.calls[0] == "study-plain-lr0.001-tune-seed0"
    assert [path.name for path in (folder / "runs").iterdir()] == ["study-study"]
    assert register(file, allow=False).exploratory == []


def test_a_rehearsal_prints_no_verdict(file, monkeypatch, capsys):
    monkeypatch.setattr(main, "conduct", lambda small, runner: conduct_stubs(small))
    main.run_rehearsal(file, 1, "cpu", as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert printed["rehearsal"] is True and "verdicts" not in printed
    # Two rates on one tuning seed, four seeds for two looks.
    runs = {(each["phase"], each["arm"]): each["runs"] for each in printed["phases"]}
    assert runs == {
        ("tuning", "plain"): 2,
        ("tuning", "warm"): 2,
        ("confirmation", "plain"): 4,
        ("confirmation", "warm"): 4,
    }


def test_a_run_beyond_its_budget_is_done_to_100_percent(file, monkeypatch):
    monkeypatch.setattr(main, "tokens_so_far", lambda name: 2 * 2560)  # twice the budget
    done = invoke("study", "study.toml", "--status")
    assert done.exit_code == 0 and done.stdout.count(" 100 % ") == 22
    assert "200 %" not in done.stdout


def test_a_study_is_planned_rehearsed_or_shown(file):
    refused = invoke("study study.toml --plan --status").exception
    assert isinstance(refused, UsageError)
    assert str(refused).endswith("exclude each other\n  give one of them")


def test_the_status_of_an_unregistered_study_says_so(file):
    done = invoke("study", "study.toml", "--status", "--format", "json")
    assert done.exit_code == 0 and json.loads(done.stdout)["exploratory"] == ["not registered"]


def test_compare_judges_the_primaries_and_calls_the_rest_exploratory(folder, conducted):
    done = invoke("compare", "--study", "study.toml")
    assert done.exit_code == 0, (done.output, done.exception)
    verdicts, rest = done.stdout.split("Exploratory: everything below was not fixed beforehand")
    assert verdicts.startswith("warm is better than plain in final loss: ")
    assert "\nExploratory: not part of the verdicts of study study.\n" in rest
    assert "nothing was fixed" not in done.stdout
    assert re.search(r"^A plain +3 .*\nB warm +3 ", rest, re.MULTILINE), rest
    rows = invoke("compare", "--study", "study.toml", "--format", "csv")
    assert rows.exit_code == 0 and {
        row["exploratory"] for row in csv.DictReader(rows.stdout.splitlines())
    } == {"true"}
    for words in ([], ["-o", "out.json"]):
        done = invoke("compare", "--study", "study.toml", "--format", "json", *words)
        assert done.exit_code == 0, (done.output, done.exception)
        found = json.loads((folder / "out.json").read_text() if words else done.stdout)
        assert [verdict["outcome"] for verdict in found["study"]["verdicts"]] == ["better"]
        assert (
            found["exploratory"].startswith("Exploratory")
            and found["rows"]
            and found["study"]["exploratory"] == []
        )
        assert "study study: warm better in final_loss" in found["labels"][0]["text"]
    for words, message in (
        (["compare", "--study", "study.toml", "small"], "leave out RUN"),
        (["compare"], "or give --study FILE"),
    ):
        refused = invoke(*words)
        assert refused.exit_code != 0 and message in str(refused.exception)


def test_learning_rates_of_a_primary_are_trained_once_and_judged(folder):
    path = folder / "study.toml"
    text = STUDY.replace("looks = 2", "looks = 1").replace('"10..14"', '"10..12"').split("[tuning]")
    arms = text[1].partition("\n\n")[2]
    path.write_text(
        text[0].replace('"final_loss"', '"lr_sensitivity"\nrates = [1e-3, 4e-3]') + arms
    )
    file = read_study(path)
    register(file, allow=False)
    launch = launcher(file)
    found = conduct(file, make_runner(file, launch))
    assert len(launch.calls) == 2 * 2 * 3 and launch.calls[:2] == [
        "study-plain-lr0.001-seed10",
        "study-plain-lr0.004-seed10",
    ]
    assert found.look == 1 and len(found.verdicts[0].seeds) == 3
    rows = list(csv.DictReader((study_folder("study") / "receipts.csv").open()))
    assert {row["phase"] for row in rows} == {"learning rates"}
    costs = read_costs(found.file)
    assert {cost["state"] for cost in costs} == {"finished"}
    warning = "warning: lr_sensitivity is judged from 5 rates on; give seven"
    assert warning in plan_lines(file, costs, 1)
    assert found.verdicts[0].why is not None and found.verdicts[0].why.kind == "not_judged"
    assert [(curve.label, curve.rates, curve.seeds) for curve in found.curves] == [
        ("plain", (1e-3, 4e-3), (10, 11, 12)),
        ("warm", (1e-3, 4e-3), (10, 11, 12)),
    ]


def test_no_value_has_no_lowest_and_no_warning(recwarn):
    """An arm without tuning has no settings."""
    assert expected_lowest([]) == [] and not list(recwarn)
