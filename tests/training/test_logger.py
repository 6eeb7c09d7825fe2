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
