"""Races and how plans are conducted: who is trained when, looks, resuming, counting."""

from __future__ import annotations

import random
import re

import pytest

from efftrain_cli.cli.race import begin
from efftrain_cli.compare.judge import Claim
from efftrain_cli.foundation.errors import RunLockedError, StoppedError, UsageError
from efftrain_cli.run.lock import take_lock
from efftrain_cli.study.conduct import conduct, runner_of
from efftrain_cli.study.plans import UNEQUAL, read_study
from efftrain_cli.study.race import count_race, race_plan
from efftrain_cli.study.registration import read_looks
from efftrain_cli.study.text import race_line
from efftrain_cli.trials.costs import Costs
from tests.study.fake import Fake, recipes

DIFFERENT = Claim()


@pytest.fixture
def folder(tmp_path):
    recipes(tmp_path, "a", "b", "c")
    return tmp_path


def normal(trial, shift=0.0, sd=0.1):
    """A loss whose difference between arms has this standard deviation."""
    return 4.0 + shift + sd / 2**0.5 * random.Random(f"{trial.arm} {trial.seed}").gauss(0, 1)


def seeds(names):
    """Arm and seed of runs by their names."""
    return [re.sub(r"race-(\w+)-\w+-seed", r"\1", name) for name in names]


def test_looks_come_after_3_5_and_8_pairs_until_the_answer_is_in(folder, capsys):
    """b is far better: closed at 3. c is undecided there and goes on alone.

    The first look has b ahead by 2.97, 2.97 and 3.12, and may spend 9/98 of 5 %: t of 14.7.
    """

    def loss(trial):
        lead = {"a": 0.0, "b": -3.0, "c": -0.05}[trial.arm]
        return 4.0 + lead + 0.03 * ((trial.seed * 7 + len(trial.arm) * 3 + ord(trial.arm)) % 5)

    runner = Fake(loss)
    plan = race_plan(["a.toml", "b.toml", "c.toml"], DIFFERENT, [3, 5, 8])
    conducted = conduct(plan, runner)
    first, second, *_ = runner.asked
    assert seeds(first) == [f"{arm}{seed}" for seed in (100, 101, 102) for arm in "abc"]
    assert {name[0] for name in seeds(second)} == {"a", "c"} and len(second) == 10
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "3 pairs: b -3.0200 [-3.7553, -2.2847] nats/token: better"
    assert [line.partition(" -")[0] for line in told[1:4]] == [
        "3 pairs: c", "5 pairs: b", "5 pairs: c",
    ]  # fmt: skip
    b, c = conducted.verdicts
    assert (b.verdict, b.n, b.remark) == (
        "better",
        3,
        "rates as written; stopped early: likely overstated",
    )
    assert (c.verdict, c.n, c.given_up, c.remark) == ("undecided", 8, False, "rates as written")
    assert conducted.caveats == []


def test_a_race_gives_up_from_five_pairs_on(folder, capsys):
    runner = Fake(lambda trial: 4.0 + 0.1 * ((trial.seed + (trial.arm == "b")) % 2))
    conducted = conduct(race_plan(["a.toml", "b.toml"], DIFFERENT, [3, 5, 8]), runner)
    (row,) = conducted.verdicts
    assert len(runner.asked) == 2 and row.given_up and row.n == 5 and row.p > 0.5
    assert capsys.readouterr().err.endswith(" nats/token: given up, p > 0.5\n")


def test_a_look_is_written_once(folder, capsys):
    """A stopped race goes on after its look; given again with other losses, it takes none."""
    plan = race_plan(["a.toml", "b.toml"], DIFFERENT, [3, 5, 8])
    with pytest.raises(StoppedError):
        conduct(plan, Fake(normal, stop_after=1))
    path = plan.folder / "plan.json"
    (first,) = read_looks(path)
    assert capsys.readouterr().err.startswith("3 pairs: b ")
    conduct(plan, Fake(normal))
    assert str(read_looks(path)[0]) == str(first)
    written = path.read_bytes()
    capsys.readouterr()
    changed = Fake(lambda trial: normal(trial, shift=(trial.arm == "b") * 2.0))
    again = conduct(plan, changed)
    assert capsys.readouterr().err == "" and path.read_bytes() == written
    assert str(again.verdicts) == str(read_looks(path)[-1])


def test_a_baseline_is_trained_once_for_all_its_races(folder):
    runner = Fake(normal)
    conduct(race_plan(["a.toml", "b.toml"], DIFFERENT, [3]), runner)
    conduct(race_plan(["a.toml", "c.toml"], DIFFERENT, [3]), runner)
    assert len(runner.trained) == 9
    conduct(race_plan(["a.toml", "c.toml"], DIFFERENT, [3], ("optim.lr=4e-3",)), runner)
    assert len(runner.trained) == 15, "another baseline"


def test_a_changed_text_or_device_is_another_baseline(folder):
    """A pattern that matches one more file; two GPUs are one kind of device."""

    def plan(device):
        return race_plan(
            ["a.toml", "b.toml"], DIFFERENT, [3], ("data.train=te*.txt",), device=device
        )

    plans = [plan("cpu"), plan("cuda:0")]
    assert plan("cuda:1").values == plans[1].values
    (folder / "text2.txt").write_text("more words")
    assert len({each.arms[0].prefix for each in (*plans, plan("cpu"))}) == 3


def test_names_of_any_length_make_valid_files(folder):
    plan = race_plan(["a" * 38, "b" * 300], DIFFERENT, [3], command="x {seed} {arm}")
    assert re.fullmatch("race-a{38}-bb-[0-9a-f]{8}-[0-9a-f]{6}", plan.name)
    backwards = race_plan(["b" * 300, "a" * 38], DIFFERENT, [3], command="x {seed} {arm}")
    assert count_race(backwards) == 1 and plan.folder != backwards.folder


def test_race_k_against_a_baseline_multiplies_its_p_by_k(folder):
    """Other pairs and margins count; the same race again does not."""
    ways = [
        (["a.toml", "b.toml"], DIFFERENT, [3]),
        (["a.toml", "b.toml"], DIFFERENT, [3, 5]),
        (["a.toml", "b.toml"], DIFFERENT, [3]),
        (["a.toml", "b.toml"], Claim(direction="either", margin=0.1), [3]),
        (["b.toml", "a.toml"], DIFFERENT, [3]),
    ]
    races = []
    for names, claim, pairs in ways:
        (row,) = conduct(race_plan(names, claim, pairs), Fake(normal)).verdicts
        races.append(row.race)
        assert row.p_race == pytest.approx(min(row.race * row.p_corrected, 1.0))
    assert races == [1, 2, 1, 3, 1]


def test_two_at_once_on_one_folder(folder):
    """A race and a study: the second start exits with 7, and trains nothing."""
    (folder / "s.toml").write_text(STUDY)
    race = race_plan(["a.toml", "b.toml"], DIFFERENT, [3])
    for plan in (race, read_study(folder / "s.toml")):
        plan.folder.mkdir(parents=True)
        runner = Fake(normal)
        with take_lock(plan.folder / "lock"), pytest.raises(RunLockedError) as error:
            conduct(plan, runner)
        assert error.value.exit_code == 7 and not runner.asked


def test_tuning_comes_first_on_seeds_of_its_own(folder):
    def loss(trial):
        settings = dict(text.split("=") for text in trial.settings)
        return normal(trial) + abs(float(settings["optim.lr"]) - 2e-3) * 1000

    runner = Fake(loss, saves=True)
    grid = {"optim.lr": (1e-3, 2e-3, 4e-3)}
    plan = race_plan(["a.toml", "b.toml"], DIFFERENT, [3], grid=grid)
    assert vars(runner_of(plan, "cpu"))["study"] == "race"
    assert race_line(plan) == "3 pairs: 6 to 6 runs after 18 runs of tuning"
    conducted = conduct(plan, runner)
    left = [path.name for path in (folder / "runs").rglob("*.safetensors")]
    assert left == ["model.safetensors"] * 24, "no run of a race is resumed"
    tuning, judged = runner.asked
    assert len(tuning) == 2 * 3 * 3 and all("tune-seed5" in name for name in tuning)
    assert all("lr0.002-seed10" in name for name in judged)
    assert conducted.grid[conducted.grid.best]["optim.lr"].tolist() == [2e-3, 2e-3]
    (row,) = conducted.verdicts
    assert row.remark.startswith("tuned on 3 seeds: a tie is told apart in 8 to 9 % of races")
    assert conducted.caveats == ["6 runs of an earlier race are used"]
    again = read_study(plan.folder / "study.toml")
    assert again.study == plan.study, "the file says what the race is"


@pytest.mark.parametrize(
    ("names", "pairs", "message"),
    [
        (["a.toml"], [3], "two arms or more"),
        (["a.toml", "a.toml"], [3], "each once"),
        (["a.toml", "b.toml"], [5, 3], "must rise"),
        (["a.toml", "b.toml"], [1, 3], "begin at 2"),
    ],
)
def test_races_that_are_none(folder, names, pairs, message):
    with pytest.raises(UsageError, match=message):
        race_plan(names, DIFFERENT, pairs)


STUDY = """\
question = "Is it?"
seeds = "5..9"
looks = [3, 5]
baseline = "a"
[[primary]]
measure = "final_loss"
direction = "different"
[tuning]
seeds = "0"
grid = { "optim.lr" = [1e-3, 2e-3] }
[[arms]]
name = "b"
recipe = "b.toml"
[[arms]]
name = "a"
recipe = "a.toml"
"""


def test_a_changed_study_is_refused(folder):
    path = folder / "s.toml"
    path.write_text(STUDY)
    conducted = conduct(read_study(path), Fake(normal, saves=True))
    edge = "best at the edge of its grid; add optim.lr=0.0005"
    assert conducted.caveats == [
        "settings were chosen on 1 seed: intervals do not include this noise",
        f"a: {edge}",
        f"b: {edge}",
        "older than the registration: s-a-lr0.001-seed5, s-b-lr0.001-seed5, s-a-lr0.001-seed6,"
        " s-b-lr0.001-seed6 and 6 more",
    ]
    assert [(row.race, row.remark) for row in conducted.verdicts] == [(1, "")]
    assert len(list((folder / "runs").rglob("optimizer.safetensors"))) == 14
    path.write_text(STUDY.replace("2e-3", "3e-3"))
    with pytest.raises(UsageError, match=r"changed since .*: tuning.grid.optim.lr\n"):
        conduct(read_study(path), Fake(normal))
    path.write_text(STUDY.replace("Is it?", "Is it really?"))
    conduct(read_study(path), Fake(normal))


def test_arms_tuned_over_unequal_numbers_of_settings_get_no_p(folder):
    path = folder / "s.toml"
    text = STUDY.replace('recipe = "b.toml"', 'recipe = "b.toml"\ngrid = {}')
    path.write_text(f'{text}[[arms]]\nname = "c"\nrecipe = "c.toml"\n')
    plan = read_study(path)
    assert [arm.points for arm in plan.arms] == [2, 1, 2]
    row, judged = conduct(plan, Fake(normal)).verdicts
    assert row.verdict == "" and row.why == UNEQUAL and row.p != row.p and judged.p < 1


@pytest.mark.parametrize(
    ("seconds", "disk", "question"),
    [
        (43_200.0, 20 * 10**9, ""),
        (43_201.0, 0, "this race may take 12 h 00 min, 0 B"),
        (None, 20 * 10**9 + 1, "this race may take 0 s, 20 GB"),
    ],
)
def test_a_long_race_asks_first(folder, monkeypatch, capsys, seconds, disk, question):
    """Above 12 hours or 20 GB; without a terminal it needs --yes."""
    costs = Costs(16, 100, seconds, disk)
    monkeypatch.setattr("efftrain_cli.trials.costs.costs_of", lambda *words, **more: costs)
    monkeypatch.setattr("typer.confirm", lambda text, abort: asked.append(text))
    asked: list[str] = []
    plan = race_plan(["a.toml", "b.toml"], DIFFERENT, [3, 5, 8])
    begin(plan, yes=True)
    time = "time unknown: nothing was measured here"
    if seconds:
        time = "about 12 h 00 min to 12 h 00 min (by earlier runs)"
    assert capsys.readouterr().err == f"3, 5, then 8 pairs: 6 to 16 runs, {time}\n"
    if not question:
        begin(plan, yes=False)
        return
    with pytest.raises(UsageError, match=f"{question}: no terminal to ask on\n  give --yes"):
        begin(plan, yes=False)
    monkeypatch.setattr("sys.stdin", Terminal())
    begin(plan, yes=False)
    assert asked == [f"{question}. Begin?"]


class Terminal:
    def isatty(self) -> bool:
        return True
