"""What the record of a session says about itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from efftrain_cli.foundation.step import Progress
from efftrain_cli.recipe.sections import Checkpoint
from efftrain_cli.training import checkpoint, logbook
from efftrain_cli.training.logbook import Logbook
from efftrain_cli.training.record import StepRecord
from tests.tiny import CPU, tiny_recipe


def book_of(run: object, screen: object, *overrides: str) -> Logbook:
    state = SimpleNamespace(progress=Progress(step=5), nonfinite=False)
    session = SimpleNamespace(recipe=tiny_recipe(*overrides), device=CPU)
    book = Logbook(None, state, session, None)  # type: ignore[arg-type]
    book._run = run  # type: ignore[assignment]
    book._screen = screen  # type: ignore[assignment]
    return book


@pytest.mark.parametrize(
    "seconds, between, said", [(0.6, 12.1, False), (0.6, 11.0, True), (0.4, 2.0, False)]
)
def test_saves_that_take_long_are_said_once(monkeypatch, seconds, between, said):
    """F54: 0.6 s are 4.96 % of 12.1 s and 5.5 % of 11 s; 5 % are allowed, and half a second."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(logbook, "time", clock)

    def begin_save(*_: object) -> None:
        clock.now += seconds

    monkeypatch.setattr(checkpoint, "begin_save", begin_save)
    lines: list[str] = []
    book = book_of(SimpleNamespace(), SimpleNamespace(say=lines.append), "checkpoint.every=5")
    monkeypatch.setattr(book, "flush", lambda: None)
    for _ in range(2):
        clock.now += between - seconds
        book.save()
    line = "warning: saving took 0.6 s of the last 11 s (5%): raise checkpoint.every (now 5)"
    assert lines == ([line] if said else [])


@pytest.mark.parametrize("every, first, later", [("10min", 60, 600), (200, 60, float("inf"))])
def test_the_first_checkpoint_comes_after_a_minute(every, first, later):
    section = Checkpoint(every=every)
    assert section.seconds_to_save(is_first=True) == first
    assert section.seconds_to_save(is_first=False) == later


def test_a_spike_is_an_event_and_a_line(monkeypatch):
    """F24."""
    events: list[tuple[str, object]] = []
    lines: list[str] = []
    run = SimpleNamespace(event=lambda *event: events.append(event), log=lambda rows: None)
    screen = SimpleNamespace(say=lines.append, show=lambda row: None)
    book = book_of(run, screen)
    for step, loss in enumerate([3.0] * 8 + [9.0, 9.0, 3.0], start=1):
        row = {"step": step, "loss": loss, "val_loss": None, "train_seconds": 0.0}
        monkeypatch.setattr(logbook, "read_records", lambda *_, row=row: [row])
        monkeypatch.setattr(book, "_complete", lambda *_: None)
        book.add(StepRecord(progress=Progress(step=step)))
    assert events == [("spike", {"step": 9, "loss": 9.0, "usual": 3.0})]
    assert lines == ["spike: step 9: loss 9.000, 3.00 times the usual 3.000"]
