"""tune-warmup given again: finished, with more budget, with more seeds, or with receipts of an
older version."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.foundation.records import write_record
from efftrain_cli.recipe.recipe import load_recipe
from efftrain_cli.tune_warmup import tune as tune_warmup
from efftrain_cli.tune_warmup.probe import Probe, Receipt
from efftrain_cli.tune_warmup.search import Search
from tests.tune_warmup.conftest import lines


def test_a_directory_of_another_search_is_refused(recipe, overrides):
    tune_warmup._claim(
        folder := Path(os.environ["EFFTRAIN_RUNS"]) / "x-tune", Search(recipe=recipe)
    )
    tune_warmup._claim(folder, Search(recipe=recipe))
    for other in (
        Search(recipe=recipe, threshold=1.2),
        Search(recipe=load_recipe("small", [*overrides, "seed=3"])),
    ):
        with pytest.raises(UsageError, match="another recipe or other options"):
            tune_warmup._claim(folder, other)


def receipt_of(probe: Probe, **changed: object) -> Receipt:
    """A receipt of a probe that was stable for its horizon, a validation every step."""
    values: dict = {
        "stable": True,
        "max_fluctuation": 1.0,
        "fluctuation_step": 1,
        "stopped_at_step": probe.horizon,
        "tokens": 500,
        "seconds": 1.0,
        "curve": tuple((step, 5.0 - 0.01 * step) for step in range(probe.horizon + 1)),
        **changed,
    }
    return Receipt(probe=probe, **values)


def test_a_finished_search_given_again_changes_nothing(recipe):
    search = Search(recipe=recipe, multiples=1)
    folder = tune_warmup.tune(search, recipe_name="tiny")
    # A survivor of another seed's search that was asked for no more; its checkpoint went with the
    # end of the search.
    probe = Probe(start=search.starts[-1], steps=6, seed=7, horizon=2)
    (folder / "probes" / probe.name).mkdir()
    write_record(folder / "probes" / probe.name / "probe.json", receipt_of(probe))
    tune_warmup.tune(search, recipe_name="tiny")
    kept = ("*.json", "*.csv", "*.toml")
    before = {path: path.read_bytes() for pattern in kept for path in folder.rglob(pattern)}
    written = {path: path.stat().st_mtime_ns for path in folder.rglob("probe.json")}
    tune_warmup.tune(search, recipe_name="tiny")
    assert {path: path.read_bytes() for pattern in kept for path in folder.rglob(pattern)} == before
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("probe.json")} == written


def test_a_budget_is_kept_and_more_of_it_goes_on(recipe, capfd):
    search = Search(recipe=recipe)
    little = replace(search, budget=search.smallest_budget() - 1)
    folder = tune_warmup.tune(little, recipe_name="tiny")
    shown = " ".join(capfd.readouterr().out.split())
    assert "NOT VERIFIED, a rule of thumb, a third of a run's full steps" in shown
    assert "too little to verify" in shown
    share = math.ceil(1000 * search.smallest_budget() / recipe.train.tokens) / 10
    assert f"the same command with --budget {share:g}% or more goes on from here" in shown
    assert sum(int(receipt["tokens"]) for receipt in lines(folder)) <= little.budget
    assert "NOT VERIFIED by a probe" in (folder / "tuned.toml").read_text()
    assert load_recipe(str(folder / "tuned.toml")) == search.recipe_with(*search.own)
    first = lines(folder)
    more = tune_warmup.tune(search, recipe_name="tiny")
    assert more == folder
    whole = tune_warmup.tune(search, recipe_name="whole")
    found, expected = lines(folder), lines(whole)
    for receipt in (*expected, *found, *first):
        del receipt["seconds"]
    assert found == expected
    assert int(found[0]["horizon"]) > int(first[0]["horizon"])
    # The survivor of the first rung went on from its checkpoint.
    events = [
        json.loads(line) for line in (folder / "probes" / found[0]["probe"] / "events.jsonl").open()
    ]
    assert [event["step"] for event in events if event["event"] == "resume"] == [
        int(first[0]["stopped_at_step"])
    ]


def test_seeds_are_probed_one_by_one(recipe):
    folder = tune_warmup.tune(
        Search(recipe=recipe, seeds=(0, 1, 2), budget=6000), recipe_name="seeds"
    )
    receipts = lines(folder)
    assert {receipt["seed"] for receipt in receipts} >= {"0", "1"}
    by_seed = {receipt["seed"]: receipt["perplexity_by_step"].split()[0] for receipt in receipts}
    assert len(set(by_seed.values())) == len(by_seed), "every seed has weights of its own"
    assert load_recipe(str(folder / "tuned.toml")).seed == recipe.seed


def test_fields_of_other_versions_are_passed_over(tmp_path):
    path = tmp_path / "probes" / "start8-steps16-seed7"
    path.mkdir(parents=True)
    expected = receipt_of(Probe(start=8, steps=16, seed=7, horizon=2), max_fluctuation=math.inf)
    write_record(path / "probe.json", expected)
    values = json.loads((path / "probe.json").read_text())
    del values["sha256"]
    values["probe"]["phase"] = "steps"
    (path / "probe.json").write_text(json.dumps({**values, "calm": None, "lost_tokens": 0}))
    (read,) = tune_warmup.read_receipts(tmp_path)
    for name in Receipt.model_fields:
        if name != "probe":
            assert getattr(read, name) == getattr(expected, name), name
    assert (read.probe.name, read.probe.horizon) == ("start8-steps16-seed7", 2)
