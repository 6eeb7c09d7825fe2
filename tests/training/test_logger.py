"""What the record of a session says about itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from efftrain_cli.foundation.step import Progress
from efftrain_cli.training import logger
from efftrain_cli.training.logger import Logbook
from tests.tiny import CPU, tiny_recipe


@pytest.mark.parametrize("between, said", [(12.0, False), (11.0, True)])
def test_saves_that_take_long_are_said_once(monkeypatch, between, said):
    """F54: 0.6 s are 5 % of 12 s, which is the most, and 5.5 % of 11 s."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(logger, "time", clock)
    monkeypatch.setattr(logger, "save", lambda *_: 0.6)
    lines: list[str] = []
    book = Logbook(
        SimpleNamespace(),  # type: ignore[arg-type]
        SimpleNamespace(progress=Progress(step=5)),  # type: ignore[arg-type]
        SimpleNamespace(recipe=tiny_recipe("checkpoint.every=5"), device=CPU),  # type: ignore[arg-type]
        SimpleNamespace(),  # type: ignore[arg-type]
        SimpleNamespace(say=lines.append),  # type: ignore[arg-type]
    )
    for _ in range(2):
        clock.now += between
        book._save()
    line = "warning: saving took 0.6 s of the last 11 s (5%): raise checkpoint.every (now 5)"
    assert lines == ([line] if said else [])


@pytest.mark.parametrize(
    ("every", "begun", "saved"),
    [
        # A minute after the start, then ten minutes after each save.
        ("10min", 0, [60, 660]),
        ("30s", 0, [30, 60, 90]),
        # Every 200 steps of a second, and a minute after the start.
        ("200", 0, [60, 200, 400, 600]),
        # A run that continues has its checkpoint.
        ("10min", 5, [600]),
    ],
)
def test_the_first_checkpoint_comes_after_a_minute(monkeypatch, every, begun, saved):
    """One step a second."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    saves = []
    monkeypatch.setattr(logger, "time", clock)
    monkeypatch.setattr(logger, "save", lambda *_: saves.append(clock.now) or 0.0)
    monkeypatch.setattr(Logbook, "flush", lambda _: None)
    book = Logbook(
        SimpleNamespace(),  # type: ignore[arg-type]
        SimpleNamespace(progress=Progress(step=begun)),  # type: ignore[arg-type]
        SimpleNamespace(recipe=tiny_recipe(f"checkpoint.every={every}"), device=CPU),  # type: ignore[arg-type]
        SimpleNamespace(ready_to_save=lambda: True),  # type: ignore[arg-type]
        SimpleNamespace(),  # type: ignore[arg-type]
    )
    for second in range(1, 700 if len(saved) != 3 else 100):
        clock.now = float(second)
        progress = Progress(step=begun + second)
        book.add(SimpleNamespace(progress=progress, val_loss=None))  # type: ignore[arg-type]
    assert saves == saved


def test_a_spike_is_an_event_and_a_line():
    """F24."""
    events: list[tuple[str, object]] = []
    lines: list[str] = []
    book = Logbook(
        SimpleNamespace(event=lambda *event: events.append(event)),  # type: ignore[arg-type]
        SimpleNamespace(progress=Progress(step=5)),  # type: ignore[arg-type]
        SimpleNamespace(recipe=tiny_recipe(), device=CPU),  # type: ignore[arg-type]
        SimpleNamespace(),  # type: ignore[arg-type]
        SimpleNamespace(say=lines.append, show=lambda row: None),  # type: ignore[arg-type]
    )
    for step, loss in enumerate([3.0] * 8 + [9.0, 9.0, 3.0], start=1):
        book._show({"step": step, "loss": loss, "val_loss": None})
    assert events == [("spike", {"step": 9, "loss": 9.0, "usual": 3.0})]
    assert lines == ["spike: step 9: loss 9.000, 3.00 times the usual 3.000"]
