"""Write what a study measured beside its page in docs/evidence: verdicts, runs and their curves.

    python benchmarks/figures/evidence_tables.py STUDY...

Run it where `efftrain study docs/evidence/STUDY.toml` trained. A study called NAME has
NAME/looks.csv, NAME/runs.csv and NAME/curves.csv; a second study of the same page, PAGE-SECOND, has
PAGE/SECOND-looks.csv and so on.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

import efftrain_cli as efftrain
from efftrain_cli.study.plans import Plan, read_study
from efftrain_cli.study.registration import read_looks

EVIDENCE = Path(__file__).resolve().parents[2] / "docs" / "evidence"


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


def runs_of(plan: Plan) -> pd.DataFrame:
    """Return a row per run of a study."""
    frame = efftrain.runs(plan.name).sort_values("name", ignore_index=True)
    rows = []
    for run in frame.itertuples():
        arms = [arm for arm in plan.arms if run.name.startswith(f"{arm.prefix}-")]
        row = {
            "phase": "tuning" if "-tune-" in run.name else "confirmation",
            "arm": max(arms, key=lambda arm: len(arm.prefix)).name,
            "seed": run.seed,
            "run": run.name,
            "status": run.status,
            "final_loss": "" if pd.isna(run.final_loss) else f"{run.final_loss:.6f}",
            "tokens": f"{run.tokens:.0f}",
        }
        rows.append(row)
    return pd.DataFrame(rows)


def looks_of(plan: Plan) -> pd.DataFrame:
    """Return a row per claim and look, as it was written."""
    margins = {claim.measure: claim.margin for claim in plan.study.primary}
    rows = []
    for number, look in enumerate(read_looks(plan.folder / "plan.json")):
        for claim in look:
            row = {
                "look": number + 1,
                "seeds": plan.looks[number],
                "measure": claim.measure,
                "direction": claim.direction,
                "margin": margins[claim.measure] or "",
                "arm": claim.arm,
                "estimate": f"{claim.estimate:.6g}",
                "low": f"{claim.low:.6g}",
                "high": f"{claim.high:.6g}",
                "p": f"{claim.p:.6g}",
                "p_holm": f"{claim.p_corrected:.6g}",
                "outcome": claim.verdict,
            }
            rows.append({key: "" if value == "nan" else value for key, value in row.items()})
    return pd.DataFrame(rows)


def write(study: str) -> None:
    """Write the tables of a study."""
    folder, prefix = tables_of(study)
    plan = read_study(EVIDENCE / f"{study}.toml")
    runs = runs_of(plan)
    runs.to_csv(folder / f"{prefix}runs.csv", index=False, lineterminator="\n")
    looks_of(plan).to_csv(folder / f"{prefix}looks.csv", index=False, lineterminator="\n")
    curves = pd.concat([curve(run) for run in runs.run])
    curves.to_csv(folder / f"{prefix}curves.csv", index=False, lineterminator="\n")


if __name__ == "__main__":
    for study in sys.argv[1:]:
        write(study)
