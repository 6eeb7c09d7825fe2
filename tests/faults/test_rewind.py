"""--on-divergence rewind: back to a stable checkpoint, past the batches that broke the run, three
times at most."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from efftrain_cli import pretrain
from efftrain_cli.compare.reading import read_numbers
from efftrain_cli.foundation.errors import DivergedError
from efftrain_cli.recipe.recipe import Recipe, load_recipe
from efftrain_cli.run.small_files import read_events
from efftrain_cli.training import trainer
from efftrain_cli.training.gradient import build_forward_backward
from tests.fake_runs import read_jsonl
from tests.trained_run import QUICK, write_text

FULL, BATCH = 16, 4


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    settings = [
        *QUICK,
        f"model.seq_len={FULL}",
        "optim.warmup_steps=2",
        f"train.tokens={30 * BATCH * FULL}",
        f"train.batch_size={BATCH}",
        "checkpoint.every=5",
    ]
    return load_recipe("small", [write_text(tmp_path), *settings])


def poison(
    monkeypatch: pytest.MonkeyPatch, bad: Callable[[int], bool], factor: float = float("nan")
) -> None:
    """Multiplies the loss of every step whose first window is `bad` by `factor`."""

    def build(*arguments):  # type: ignore
        forward_backward = build_forward_backward(*arguments)

        def poisoned(batch, plan):  # type: ignore
            gradient = forward_backward(batch, plan)
            if bad(plan.window_start):
                gradient.scalars["loss"].mul_(factor)
            return gradient

        return poisoned

    monkeypatch.setattr(trainer, "build_forward_backward", build)


def start(recipe: Recipe, **options: object) -> Path:
    return pretrain.start(recipe, recipe_name="x", name="r", with_probe=False, **options)  # type: ignore


def events(run: Path, kind: str) -> list[dict]:
    return [event for event in read_events(run) if event["event"] == kind]


def test_the_bad_batches_are_skipped_and_the_run_ends(recipe, monkeypatch, capsys):
    poison(monkeypatch, lambda window: window == 12 * BATCH)  # step 13
    run = start(recipe, rewinding=True)
    said = capsys.readouterr().out
    assert "rewound to step 12; the batches since are skipped" in said
    assert "pretrain --resume" not in said[: said.index("rewound")], "nothing is to be done"
    (event,) = events(run, "rewind")
    # The state before step 13 was saved when it diverged, and its loss was as usual.
    assert (event["from_step"], event["to_step"], event["skipped_windows"]) == (
        13,
        12,
        [12 * BATCH, 13 * BATCH],
    )
    numbers = read_numbers(run)
    assert numbers.status == "finished"
    assert numbers.rewinds == 1
    assert "rewound 1 time" in [mark.text for mark in numbers.marks]
    assert not any(mark.kind == "resumed" for mark in numbers.marks)
    assert numbers.step == 30
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["tokens"] == 30 * BATCH * FULL
    assert last["tokens"] + last["tokens_discarded"] == last["windows"] * FULL == 31 * BATCH * FULL


def test_a_second_divergence_at_the_same_place_goes_further_back(recipe, monkeypatch):
    poison(monkeypatch, lambda window: 12 * BATCH <= window < 14 * BATCH)
    run = start(recipe, rewinding=True)
    assert [event["to_step"] for event in events(run, "rewind")] == [12, 10]
    assert [event["skipped_windows"] for event in events(run, "rewind")] == [[48, 52], [40, 56]]
    assert read_numbers(run).status == "finished"
    left = [event["to"] for event in events(run, "set_aside")]
    assert left and all(
        ".left" in name for name in left
    )  # they are sound, and not to be called corrupt
    # What the second rewind abandoned stays spent.
    second = events(run, "rewind")[1]
    assert second["tokens_abandoned"] == 2 * BATCH * FULL
    rows = read_jsonl(run / "metrics.jsonl")
    step_11 = next(row for row in rows if row["step"] == 11 and row["segment"] == 2)
    assert step_11["total_flops"] == pytest.approx(13 * step_11["flops"])


def test_after_three_rewinds_a_divergence_ends_the_run(recipe, monkeypatch):
    poison(monkeypatch, lambda window: window >= 12 * BATCH)
    with pytest.raises(DivergedError):
        start(recipe, rewinding=True)
    run = Path(pretrain.run_path("r"))
    assert [event["to_step"] for event in events(run, "rewind")] == [12, 10, 5]
    assert len(events(run, "diverged")) == 4
    assert events(run, "end")[-1]["status"] == "diverged"
    assert read_numbers(run).status == "diverged"


def test_without_asking_nothing_is_rewound(recipe, monkeypatch):
    poison(monkeypatch, lambda window: window == 12 * BATCH)
    with pytest.raises(DivergedError):
        start(recipe)
    assert not events(Path(pretrain.run_path("r")), "rewind")


def test_a_lasting_spike_is_a_divergence_only_where_rewinding_was_asked_for(recipe, monkeypatch):
    poison(monkeypatch, lambda window: 12 * BATCH <= window < 22 * BATCH, factor=3.0)
    rewound = start(recipe, rewinding=True)
    (event,) = events(rewound, "rewind")
    assert (event["from_step"], event["to_step"]) == (22, 10)
    (spike, *_) = events(rewound, "spike")
    assert spike["step"] == 13
    plain = pretrain.start(recipe, recipe_name="x", name="plain", with_probe=False)
    assert [event["step"] for event in events(plain, "spike")] == [13]
    assert not events(plain, "rewind")
    assert read_numbers(plain).status == "finished"


def test_a_rewound_run_that_is_resumed_goes_on_as_if_it_had_not_stopped(recipe, monkeypatch):
    poison(monkeypatch, lambda window: window == 12 * BATCH)
    whole = start(recipe, rewinding=True)
    run = pretrain.start(
        recipe, recipe_name="x", name="cut", with_probe=False, rewinding=True, steps=13
    )
    pretrain.resume("cut", with_probe=False)
    last = [
        json.loads((path / "metrics.jsonl").read_text().splitlines()[-1]) for path in (whole, run)
    ]
    for key in ("step", "tokens", "windows", "loss", "val_loss", "tokens_discarded", "total_flops"):
        assert last[0][key] == last[1][key]
