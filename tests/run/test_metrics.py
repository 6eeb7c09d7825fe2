"""Lines that are followed while they are written."""

from __future__ import annotations

import os
import sys

from efftrain_cli.run.metrics import _is_input_closed


def test_input_is_closed_when_its_writer_has_gone(monkeypatch):
    read_end, write_end = os.pipe()
    with os.fdopen(read_end) as reader:
        monkeypatch.setattr(sys, "stdin", reader)
        assert not _is_input_closed(0.0)
        os.write(write_end, b"still here")
        assert not _is_input_closed(0.0)
        os.close(write_end)
        assert _is_input_closed(0.0)
    assert _is_input_closed(0.0), "a standard input that was closed"
