"""Write what a study measured beside its page in docs/evidence: verdicts, runs and their curves.

    python benchmarks/figures/evidence_tables.py STUDY...

Run it where `efftrain study docs/evidence/STUDY.toml` trained. A study called NAME has
NAME/looks.csv, NAME/runs.csv and NAME/curves.csv; a second study of the same page, PAGE-SECOND, has
PAGE/SECOND-looks.csv and so on. Where runs.csv was there before, it prints how far the final losses
are from those.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pandas as pd

import efftrain_cli as efftrain

EVIDENCE = Path(__file__).resolve().parents[2] / "docs" / "evidence"
RUNS = Path("runs")


def tables_of(study: str) -> tuple[Path, str]:
    """Return the folder of a study's tables, and what their names begin with."""
    folder = EVIDENCE / study
    if folder.is_dir():
        return folder, ""
    page = max(
        (path for path in EVIDENCE.iterdir() if path.is_dir() and study.startswith(path.name)),
        key=lambda path: len(path.name),
    )
    return page, study.removeprefix(f"{page.name}-") + "-"


def curve(run: str) -> pd.DataFrame:
    """Return a run's validation losses, nats per token, by step, tokens and FLOPs."""
    rows = efftrain.metrics(run)
    rows = rows[rows.val_loss.notna()]
    return pd.DataFrame(
        {
            "run": run,
            "step": rows.step,
            "tokens": rows.tokens.map("{:.0f}".format),
            "flops": rows.total_flops.map("{:.6g}".format),
            "val_loss": rows.val_loss.map("{:.5f}".format),
        }
    )


def write(study: str) -> None:
    """Write the tables of a study; print how its final losses differ from the ones before."""
    folder, prefix = tables_of(study)
    records = RUNS / f"{study}-study"
    receipts = pd.read_csv(records / "receipts.csv", keep_default_na=False, dtype=str)
    receipts["lr"] = receipts.run.str.extract(r"-lr([0-9.e-]+?)-(?:tune-)?seed", expand=False)
    columns = ["phase", "arm", "seed", "run", "status", "final_loss", "tokens"]
    if (receipts.phase == "learning rates").any():
        columns.insert(2, "lr")

    path = folder / f"{prefix}runs.csv"
    if path.exists():
        before = pd.read_csv(path, index_col="run").final_loss
        after = pd.to_numeric(receipts.set_index("run").final_loss)
        differences = (after - before).abs().dropna()
        print(
            f"{study}: {len(differences)} of {len(before)} runs before, {len(after)} now; final"
            f" losses differ by at most {differences.max():.6f} nats,"
            f" {(differences < 1.5e-6).sum()} by none"
        )
    receipts[columns].to_csv(path, index=False, lineterminator="\n")
    shutil.copyfile(records / "looks.csv", folder / f"{prefix}looks.csv")
    curves = pd.concat([curve(run) for run in receipts.run])
    curves.to_csv(folder / f"{prefix}curves.csv", index=False, lineterminator="\n")


if __name__ == "__main__":
    for study in sys.argv[1:]:
        write(study)
