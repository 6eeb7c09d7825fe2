"""Out of memory, told with the setting that would have fitted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from efftrain_cli.foundation.errors import OutOfMemoryError
from efftrain_cli.plan.preview import PlanSummary
from efftrain_cli.recipe.recipe import Recipe


@contextmanager
def memory_errors(recipe: Recipe, summary: PlanSummary) -> Iterator[None]:
    """Turns running out of memory, of the device or the host, into an error that names what to change.

    Raises:
        OutOfMemoryError: memory ran out inside.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        sequences, seq_len = summary.largest_micro_batch
        if sequences > 1:
            smaller = f"set train.micro_batch_tokens = {sequences // 2 * seq_len} (now {recipe.train.micro_batch_tokens})"
        else:
            smaller = "lower model.seq_len or the model's size"
        if not recipe.train.activation_checkpointing:
            smaller += ", or train.activation_checkpointing = true (slower, much less memory)"
        raise OutOfMemoryError(
            f"out of memory; the largest micro-batch planned is {sequences} sequences of {seq_len} tokens: {smaller}. "
            f"The step's result does not depend on either. [{str(error).splitlines()[0] if str(error) else 'MemoryError'}]"
        ) from None


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(error)
    # PyTorch's CPU allocator raises plain RuntimeErrors.
    return "can't allocate memory" in text or "not enough memory" in text
