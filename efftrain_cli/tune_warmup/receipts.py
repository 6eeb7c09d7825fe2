"""What `efftrain tune-warmup` writes about its probes: probe.json beside each, and receipts.csv for all. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from efftrain_cli.foundation.console import perplexity
from efftrain_cli.foundation.files import csv_text, write_whole
from efftrain_cli.foundation.records import Record, read_record
from efftrain_cli.tune_warmup.search import Receipt, Search

if TYPE_CHECKING:
    import pandas as pd


class SearchFile(Record):
    """search.json of a search: its options."""

    restore: ClassVar[str] = "restore it, or give another --name"

    schema_version: int
    tune: str
    multiples: int
    threshold: float
    max_share: float
    eval_every: int | None


def read_receipts(folder: Path) -> list[Receipt]:
    """Return the receipts of a search's probes, in the order in which they ended."""
    paths = sorted((folder / "probes").glob("*/probe.json"))
    paths.sort(key=lambda path: path.stat().st_mtime_ns)
    return [read_record(path, Receipt) for path in paths]


def receipts_frame(search: Search, receipts: Sequence[Receipt]) -> pd.DataFrame:
    """Return a row per probe, written as receipts.csv has it: `sequences` is the ramp's length if the batch size is
    warmed up, and `perplexity_by_step` the curve as `step:perplexity` pairs."""
    import pandas as pd

    rows = []
    for receipt in receipts:
        probe = receipt.probe
        measures = {
            "max_grad_norm": receipt.max_grad_norm,
            "max_adam_sqrt_v": receipt.max_adam_sqrt_v,
            "max_loss_ratio": receipt.max_loss_ratio,
        }
        curve = (f"{step}:{perplexity(loss):.6g}" for step, loss in receipt.curve)
        rows.append(
            {
                "probe": probe.name,
                "start": probe.start,
                "steps": probe.steps,
                "sequences": search.grid.ramp(probe.start, probe.steps) or "",
                "seed": probe.seed,
                "horizon": probe.horizon,
                "verdict": receipt.verdict,
                "stopped_at_step": receipt.stopped_at_step,
                "tokens": receipt.tokens,
                "share_of_budget": f"{receipt.tokens / search.recipe.train.tokens:.6f}",
                "seconds": f"{receipt.seconds:.3f}",
                "max_fluctuation": f"{receipt.max_fluctuation:.4f}",
                "fluctuation_step": receipt.fluctuation_step,
                **{
                    name: "" if value is None else f"{value:.6g}"
                    for name, value in measures.items()
                },
                "perplexity_by_step": " ".join(curve),
            }
        )
    return pd.DataFrame(rows, dtype=object)


def write_receipts(path: Path, frame: pd.DataFrame) -> None:
    """Write receipts.csv: one line per probe."""
    write_whole(path, csv_text(list(frame.columns), frame.itertuples(index=False)))
