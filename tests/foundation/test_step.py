"""The values of a step: a run begins with nothing done, and batches are copied without waiting."""

from __future__ import annotations

from efftrain_cli.foundation.step import Batch, Progress


def test_a_run_begins_with_nothing_done():
    assert not any(Progress())


def test_a_batch_is_copied_without_waiting():
    class Pinned:
        def to(self, device: str, *, non_blocking: bool) -> tuple[str, bool]:
            return device, non_blocking

    copied = Batch(Pinned(), Pinned()).to("cuda")  # type: ignore[arg-type]
    assert (copied.tokens, copied.targets) == (("cuda", True), ("cuda", True))
