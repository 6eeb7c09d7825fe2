"""tune-warmup with real probes: its files, its end, and a search that is killed half-way."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import inf, log
from pathlib import Path

import pytest

from efftrain_cli import pretrain
from efftrain_cli.cli.tune_warmup import parse_budget
from efftrain_cli.data.prepare import limits_of, prepare
from efftrain_cli.data.windows import Windows
from efftrain_cli.foundation.errors import DivergedError, UsageError
from efftrain_cli.recipe.recipe import dump_recipe, load_recipe
from efftrain_cli.training.stages import train_stages
from efftrain_cli.tune_warmup.candidates import TuneConfig, find_candidates
from efftrain_cli.tune_warmup.prober import Prober
from efftrain_cli.tune_warmup.search import Receipt, Verdict
from efftrain_cli.tune_warmup.tune import describe, race_command, shown, tune
from tests.conftest import cli, invoke
from tests.fake_runs import write_sealed
from tests.trained_run import write_text
from tests.tune_warmup.search import SETTINGS, lines, probe_here


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TuneConfig:
    """Two learning rates, of which the second is stable; no probe can be stuck."""
    monkeypatch.setattr(Prober, "unigram_loss", 99.0)
    return TuneConfig(
        recipe="small",
        settings=tuple(probe_here(tmp_path, monkeypatch)),
        duration="optim.lr=1e-1,1e-3",
        seeds=(0, 1),
        steps=12,
        threshold=1.05,
        name="search",
    )


def folder_of(name: str) -> Path:
    return Path(os.environ["EFFTRAIN_RUNS"]) / name


class Killed(BaseException):
    """Stands for a process that is gone from one line to the next."""


def test_a_search_leaves_receipts_and_a_recipe_and_a_killed_one_the_same(
    config, capsys, monkeypatch
):
    """F51: no probe is repeated."""
    folder = tune(config)
    receipts = lines(folder)
    assert receipts[0]["setting"] == "optim.lr=1e-1" and receipts[0]["unstable_at"]
    for receipt in receipts:
        assert (float(receipt["fluctuation"]) > 1.05) == bool(receipt["unstable_at"])
    assert len(list((folder / "probes").glob("*/metrics.jsonl"))) == len(receipts) == 4
    assert not list((folder / "probes").glob("*/checkpoints"))
    head = (folder / "receipts.csv").read_text().partition("\n")[0]
    assert head == "setting,seed,steps,tokens,fluctuation,unstable_at,loss"
    shown = capsys.readouterr().out.splitlines()
    names = ["tried", "control", "found", "cost", "recipe", "next"]
    assert [line.split()[0] for line in shown] == names
    tokens = sum(int(receipt["tokens"]) for receipt in receipts)
    assert shown[2:4] == [
        "found   lr=1e-3: stable on 2 of 2 seeds for 12 steps",
        f"cost    4 probes, {tokens:,} tokens: {tokens / 80:.0f} % of a run",
    ]
    text = (Path("recipes") / "small-tuned.toml").read_text()
    assert text.startswith("# Found by `efftrain tune-warmup`: stable for 12 steps on every seed")
    assert 'base = "small"' in text
    race = shown[5].removeprefix("next    efftrain ")
    assert race.startswith("race small small-tuned --set") and "optim.lr" not in race
    assert "small-tuned" in cli(f"{race} --plan").output
    assert load_recipe("small-tuned") == load_recipe("small", [*config.settings, "optim.lr=1e-3"])

    longer = replace(config, name="longer")
    tune(replace(longer, steps=11))
    assert lines(tune(longer)) == receipts, "ended probes have no checkpoint, and begin again"

    trained: list[int] = []

    def train_until_killed(state, *rest) -> Iterator:  # type: ignore
        for record in train_stages(state, *rest):
            trained.append(record.progress.step)
            if len(trained) % 11 == 0:
                raise Killed
            yield record

    monkeypatch.setattr(pretrain, "train_stages", train_until_killed)
    again = replace(config, name="killed")
    kills = 0
    while kills < 100:
        try:
            tune(again)
            break
        except Killed:
            kills += 1
    assert kills > 1 and lines(folder_of("killed")) == receipts
    trained.clear()
    tune(again)
    assert trained == []


def test_where_nothing_is_stable_the_search_says_so_and_fails(config, capsys):
    hopeless = replace(config, duration="optim.lr=1e30,1e29", name="hopeless")
    with pytest.raises(DivergedError, match=r"no warmup is recommended.*\n  lower optim\.lr"):
        tune(hopeless)
    shown = capsys.readouterr().out
    assert "found   nothing that is stable on all seeds" in shown
    probes = [line for line in lines(folder_of("hopeless")) if "lr=" in line["setting"]]
    assert {line["fluctuation"] for line in probes} == {"inf"}
    assert not Path("recipes").exists()


def test_a_stable_control_says_that_nothing_was_told_apart(config, capsys):
    """(d), and its exit code."""
    calm = replace(config, threshold=1e9, name="calm")
    with pytest.raises(DivergedError, match=r"train with optim\.lr=1e-1, or raise"):
        tune(calm)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("control lr=1e-1: stable on 2 seeds (loss ")
    assert shown[1] == "found   nothing: lr=1e-1 is stable too"
    assert len(lines(folder_of("calm"))) == 2


def test_the_unigram_plateau_is_that_of_the_texts(tmp_path):
    """Cross-entropy by hand: tokens counted in Python, each 64 times, and one more of each kind."""
    overrides = [write_text(tmp_path), *SETTINGS]
    prober = Prober(
        folder=tmp_path, config=TuneConfig(recipe="small", settings=tuple(overrides), threshold=1.3)
    )
    recipe = load_recipe("small", overrides)
    corpus = prepare(recipe.data, limits=limits_of(recipe))
    counts = Counter(corpus.train.read([0], corpus.train.tokens)[0].tolist())
    total = 64 * corpus.train.tokens + corpus.vocab_size
    windows = Windows(corpus.valid, 32, 0).validation(recipe.eval.windows)
    losses = [-log((64 * counts[token] + 1) / total) for token in windows[:, 1:].flatten().tolist()]
    assert prober.unigram_loss == pytest.approx(sum(losses) / len(losses))


def test_a_probe_of_another_search_is_refused(config):
    probe = folder_of("search") / "probes" / "lr1e-1-seed0"
    probe.mkdir(parents=True)
    (probe / "recipe.toml").write_text(dump_recipe(load_recipe("small")))
    with pytest.raises(UsageError, match=r"exists with another recipe \(.*train\.tokens"):
        tune(config)


def test_a_recipe_of_one_s_own_is_not_overwritten(config):
    Path("recipes").mkdir()
    (Path("recipes") / "small-tuned.toml").write_text('base = "small"\n')
    with pytest.raises(UsageError, match="was not written by tune-warmup"):
        tune(config)


def test_a_receipt_is_what_a_run_has_shown(config, tmp_path, monkeypatch):
    """Its perplexity is e^0.5 = 1.65 times its best at step 4. Token frequencies have a loss of 5,
    the first weights one of 6."""
    monkeypatch.setattr(Prober, "unigram_loss", 5.0)
    prober = Prober(folder=tmp_path, config=config)
    calm = [(0, 6.0), (10, None), (20, 4.0)]
    curve = ((0, 6.0), (20, 4.0))

    def read(rows, **last) -> Receipt:
        written = []
        for number, (tokens, loss) in enumerate(rows):
            written.append({"step": number, "segment": 0, "tokens": tokens, "val_loss": loss})
        written[-1] |= last
        write_sealed(tmp_path / "metrics.jsonl", written)
        return prober.read(tmp_path, "diverged")

    assert read([*calm, (30, 4.5)]) == (
        pytest.approx(1.6487, abs=1e-4), 3, 3, pytest.approx(4.95), (*curve, (30, 4.5)),
    )  # fmt: skip
    assert read([*calm, (30, None)], nonfinite=True)[:3] == (inf, 3, 3)
    # A weight or a validation loss that is not finite is in no row.
    assert read(calm) == (inf, 3, 2, pytest.approx(4.95), (*curve, (20, inf)))


def test_a_budget_for_the_first_probe_trains_it_alone(config, capsys):
    """12 steps of 8 x 32 tokens."""
    with pytest.raises(UsageError, match=r"below the first probe\n  give at least 3072$"):
        tune(replace(config, budget=3071))
    assert not (folder_of("search") / "probes").exists()
    with pytest.raises(DivergedError, match=r"lower optim\.lr"):
        tune(replace(config, budget=3072))
    told = capsys.readouterr()
    assert told.out.startswith("cost    1 probe, ") and told.out.count("\n") == 1
    (receipt,) = lines(folder_of("search"))
    more = 3072 + int(receipt["tokens"])
    assert told.err.endswith(f"the budget ended\n  --budget {more} continues from here\n")
    with pytest.raises(UsageError, match="has one value, so nothing is searched"):
        tune(replace(config, duration="optim.lr=4"))
    with pytest.raises(UsageError, match=r"for example --set optim\.warmup_steps=100"):
        tune(replace(config, settings=(*config.settings, "optim.warmup_steps=0")))


def test_the_default_lists_are_around_the_recipe_s_own(tmp_path):
    """A warmup of 8 tokens and 20 steps: starts double to below 32; durations are 1.4 apart from
    the learning-rate warmup of 4 to 1.32 x 31 full steps."""
    overrides = [write_text(tmp_path), *SETTINGS]
    settings = (*overrides, "seq_len_warmup={start = 8, steps = 20}")
    config = TuneConfig(recipe="small", settings=settings, threshold=1.3)
    found = find_candidates(config, load_recipe("small", settings))
    assert found.starts == [("seq_len_warmup.start=8",), ("seq_len_warmup.start=16",)]
    steps = [int(setting[0].rpartition("=")[2]) for setting in found.durations]
    assert steps == [40, 28, 20, 14, 10, 7, 5, 4] and steps[found.first] == 20
    assert found.control == ("seq_len_warmup=false",)
    assert (found.climb, set(found.horizons)) == (4, {12})
    assert list(found.seeds) == [1234, 1235, 1236]
    # Without a warmup they are around a third of the run, here of 46 steps.
    settings = (*overrides, "train.tokens=12_000", "optim.warmup_steps=1")
    found = find_candidates(replace(config, settings=settings), load_recipe("small", settings))
    assert found.starts == [("seq_len_warmup.start=8",), ("seq_len_warmup.start=16",)]
    steps = [int(setting[0].rpartition("=")[2]) for setting in found.durations]
    assert steps == [60, 42, 30, 21, 15, 11, 8, 5, 4, 3, 2, 1] and found.first == 6


def test_a_verdict_is_described_with_its_mean_loss():
    """(e): the loss of all seeds; the first instability of any."""

    def described(words: tuple[str, ...], *unstable_at: int | None) -> str:
        receipts = []
        for step, loss in zip(unstable_at, (4.0, 4.2), strict=True):
            receipts.append(Receipt(1.0, step, 45, 9.0, ((0, 6.0), (500, 9.0), (900, loss))))
        return describe(Verdict(("a.start=8",), 45, words, tuple(receipts)))

    assert described(("stable", "stable"), None, None) == "stable on 2 seeds (loss 4.10)"
    assert described(("stable", "stuck"), None, None) == "stuck on seed 2 (loss 4.10)"
    assert described(("unstable", "unstable"), 15, 12) == "unstable at step 12 (loss 4.10)"
    assert shown(("optim.lr=0.01", "seq_len_warmup=false")) == "lr=0.01 seq_len_warmup=false"


def test_a_length_warmup_races_the_recipe_without_one():
    """Of `mine` the base is a part of a recipe."""
    Path("part.toml").write_text("seed = 1")
    Path("mine.toml").write_text(f'base = "part.toml"\n{dump_recipe(load_recipe("small-slw"))}')
    best = Verdict(("seq_len_warmup.start=8", "seq_len_warmup.steps=60"), 45, (), ())
    settings = ("data.train=my.txt", "seq_len_warmup.start=16", "optim.lr=1e-3")
    rivals = {"small-slw": "small", "unstable": "unstable", "mine.toml": "mine.toml"}
    for recipe, rival in rivals.items():
        command = race_command(
            TuneConfig(recipe=recipe, settings=settings, threshold=1.3), best, "tuned"
        )
        assert command == f"efftrain race {rival} tuned --set data.train=my.txt --set optim.lr=1e-3"


def test_the_plan_is_printed_and_nothing_trained(tmp_path):
    """45 steps on three seeds: of 64 x 64 tokens, or of 89,088 tokens with the warmup."""
    shown = cli("tune-warmup --recipe unstable-slw --plan").output
    assert shown.splitlines() == [
        "starts  start=16, 32: 15 steps each",
        "lengths steps=170, 120, 85, 60, 42, 30, 21, 15: 45 steps for the first, steps=60",
        "seeds   1234, 1235, 1236: stable on all of them",
        "control 553K tokens (92.2 % of a run) for seq_len_warmup=false, at most",
        "cost    267K tokens (44.5 % of a run) for start=16 steps=60, at most",
    ]
    assert not (tmp_path / "runs").exists()
    least = cli("tune-warmup unstable-slw --plan --steps 1 --threshold 1").output
    assert ": 1 steps for the first, steps=60" in least
    for wrong in ("--steps 0", "--threshold 0.9"):
        assert invoke(f"tune-warmup unstable-slw --plan {wrong}").exit_code == 2


def test_budgets_are_shares_or_tokens():
    for text, tokens in (("10%", 60_000), (" 2.5 % ", 15_000), ("500M", 500_000_000)):
        assert parse_budget(text, 600_000) == tokens
    for text in ("0%", "ten", "-5%", "0", "1e400%"):
        with pytest.raises(UsageError, match="give a share of a full run, such as 10%"):
            parse_budget(text, 600_000)
