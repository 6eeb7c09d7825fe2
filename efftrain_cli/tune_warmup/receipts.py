"""What `efftrain tune-warmup` writes about its probes: probe.json beside each, and receipts.csv for all. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar

from efftrain_cli.foundation.console import perplexity
from efftrain_cli.foundation.files import csv_text, write_whole
from efftrain_cli.foundation.records import Part, Record, read_record, write_record
from efftrain_cli.tune_warmup.search import Probe, Receipt, Search


class ProbePart(Part):
    """A probe's settings; those from before seeds have none."""

    start: int
    steps: int
    seed: int | None = None
    horizon: int


class ProbeFile(Record):
    """probe.json of a probe's run directory: a receipt."""

    restore: ClassVar[str] = "restore it, or remove its folder: the probe is then trained again"

    schema_version: int
    probe: ProbePart
    stable: bool
    max_fluctuation: float | None
    fluctuation_step: int
    stopped_at_step: int
    tokens: int
    seconds: float
    curve: list[list[int | float | None]]
    calm: float | None = None
    max_grad_norm: float | None = None
    max_adam_sqrt_v: float | None = None
    max_loss_ratio: float | None = None
    lost_tokens: int = 0
    lost_seconds: float = 0.0


class SearchFile(Record):
    """search.json of a search: its options."""

    restore: ClassVar[str] = "restore it, or give another --name"

    schema_version: int
    tune: str | None = None
    multiples: int
    threshold: float
    max_share: float
    eval_every: int | None
    calm: float | None = None


def write_receipt(path: Path, receipt: Receipt) -> None:
    """Writes probe.json into the probe's run directory; infinity becomes null."""
    values = {"schema_version": ProbeFile.newest, **asdict(receipt)}
    values["curve"] = [
        [step, loss if math.isfinite(loss) else None] for step, loss in receipt.curve
    ]
    values["max_fluctuation"] = (
        receipt.max_fluctuation if math.isfinite(receipt.max_fluctuation) else None
    )
    write_record(path / "probe.json", ProbeFile.model_validate(values))


def read_receipts(folder: Path, seed: int) -> list[Receipt]:
    """The receipts of a search's probes, in the order in which they ended; `seed` is that of receipts from before they
    had one."""
    found = []
    for path in sorted((folder / "probes").glob("*/probe.json")):
        values = read_record(path, ProbeFile).to_json()
        values.pop("schema_version")
        values["probe"].pop("phase", None)
        values["probe"] = Probe(**{"seed": seed, **values["probe"]})
        values["curve"] = tuple(
            (step, math.inf if loss is None else loss) for step, loss in values["curve"]
        )
        if values["max_fluctuation"] is None:
            values["max_fluctuation"] = math.inf
        found.append((path.stat().st_mtime_ns, Receipt(**values)))
    return [receipt for _, receipt in sorted(found, key=lambda entry: entry[0])]


COLUMNS = (
    "probe,start,steps,sequences,seed,horizon,verdict,stopped_at_step,tokens,share_of_budget,seconds,max_fluctuation,"
    "fluctuation_step,calm,max_grad_norm,max_adam_sqrt_v,max_loss_ratio,lost_tokens,perplexity_by_step"
)


def write_receipts(path: Path, search: Search, receipts: Sequence[Receipt]) -> None:
    """Writes receipts.csv: one line per probe; `sequences` is the ramp's length where the batch size is warmed up,
    `lost_tokens` those of its tokens that were trained for a checkpoint that is gone, and `perplexity_by_step` the
    curve as `step:perplexity` pairs."""
    rows: list[list[object]] = []
    for receipt in receipts:
        probe = receipt.probe
        beside = (
            receipt.calm,
            receipt.max_grad_norm,
            receipt.max_adam_sqrt_v,
            receipt.max_loss_ratio,
        )
        rows.append([
            *(probe.name, probe.start, probe.steps, search.grid.ramp(probe.start, probe.steps), probe.seed),
            *(probe.horizon, receipt.verdict, receipt.stopped_at_step, receipt.tokens),
            *(f"{receipt.tokens / search.recipe.train.tokens:.6f}", f"{receipt.seconds:.3f}"),
            *(f"{receipt.max_fluctuation:.4f}", receipt.fluctuation_step),
            *("" if value is None else f"{value:.6g}" for value in beside),
            *(receipt.lost_tokens, " ".join(f"{step}:{perplexity(loss):.6g}" for step, loss in receipt.curve)),
        ])  # fmt: skip
    write_whole(path, csv_text(COLUMNS.split(","), rows))
