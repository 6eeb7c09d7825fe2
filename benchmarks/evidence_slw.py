"""The runs behind docs/evidence/sequence-length-warmup.md, through the command line, on one thread each.

    python benchmarks/evidence_slw.py                     train what is missing, then write tables and plots
    python benchmarks/evidence_slw.py --report-only       tables and plots of the runs that exist

A run or search that exists is continued or left alone, so the script can be stopped and started again. Runs go to
EFFTRAIN_RUNS (default ./runs), tables and plots to docs/evidence/sequence-length-warmup/.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from efftrain_cli.recipe.recipe import load_recipe
from efftrain_cli.run.directory import run_path
from efftrain_cli.run.rows import read_events, read_metrics
from efftrain_cli.run.stability import EarlyWarning, SpikeAlarm, Stability, measure, measure_run
from efftrain_cli.tune_warmup.verdict import fluctuation

SEEDS = (0, 1, 2)
RECIPES = ("small-large-batch", "small-slw")
OUT = Path(__file__).resolve().parent.parent / "docs" / "evidence" / "sequence-length-warmup"


def efftrain(*arguments: str) -> int:
    """Runs the command on one thread, its output below ours."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    print("efftrain", *arguments, flush=True)
    return subprocess.run([sys.executable, "-m", "efftrain_cli", *arguments], env=environment, check=False).returncode


def name_of(recipe: str, seed: int) -> str:
    return f"{recipe}-seed{seed}"


def is_finished(path: Path) -> bool:
    return any(event.get("event") == "end" and event.get("status") == "finished" for event in read_events(path))


def train_all(recipes: Sequence[str], seeds: Sequence[int]) -> None:
    for seed in seeds:
        for recipe in recipes:
            path = run_path(name_of(recipe, seed))
            if is_finished(path):
                continue
            if (path / "recipe.toml").exists():
                efftrain("pretrain", "--resume", path.name)
            else:
                efftrain("pretrain", "--recipe", recipe, "--seed", str(seed), "--no-probe")


FIRST_STEPS = 30
FIRST_SEEDS = tuple(range(10, 34))
"""Seeds of the first steps: none of them was used in choosing settings."""
STEEP = ("optim.lr=5e-2", "optim.min_lr=5e-3")
FIRST_ARMS = {
    # (setting, arm): recipe and overrides. "steep" was chosen by hand, "tuned" by tune-warmup at seed 1234.
    ("steep", "large batch"): ("small-large-batch", STEEP),
    ("steep", "sequence length warmup"): ("small-slw", (*STEEP, "seq_len_warmup.start=8", "seq_len_warmup.steps=150")),
    ("steep", "batch size warmup"): (
        "small-batch-warmup",
        (*STEEP, *(f"batch_size_warmup.{key}" for key in ("start=8", "increment=8", "sequences=3240"))),
    ),
    ("tuned", "large batch"): ("small-large-batch", ()),
    ("tuned", "sequence length warmup"): ("small-slw", ()),
    ("tuned", "batch size warmup"): ("small-batch-warmup", ()),
}


def train_first_steps(path: Path, settings: Sequence[str], seeds: Sequence[int]) -> None:
    """first-steps.csv: the first steps of many seeds, one line each; lines that exist are not trained again. The rows of each run
    go to first-steps-rows.csv."""
    import torch

    from efftrain_cli.training.session import fresh_state, prepare_session
    from efftrain_cli.training.trainer import read_records, train

    torch.set_num_threads(1)
    done = {(row["setting"], row["arm"], row["seed"]) for row in read_csv(path)}
    for seed in seeds:
        for (setting_name, arm), (base, overrides) in FIRST_ARMS.items():
            if (setting_name, arm, str(seed)) in done or setting_name not in settings:
                continue
            recipe = load_recipe(base, [*overrides, f"seed={seed}"])
            setting = prepare_session(recipe, torch.device("cpu"))
            state = fresh_state(setting)
            rows = []
            for record in train(state, recipe, setting.train_data, setting.val_windows, until=FIRST_STEPS):
                rows += read_records(state, recipe, [record])
            steps = rows[1:]
            found = measure(steps)
            largest, at = fluctuation([(row["step"], row["val_loss"]) for row in rows if row["val_loss"] is not None])
            key = {"setting": setting_name, "arm": arm, "seed": seed}
            for row in steps:
                values = {column: f"{row[column]:.5g}" for column in ("loss", "grad_norm", "adam_sqrt_v_max")}
                append_csv(path.with_name("first-steps-rows.csv"), {**key, "step": row["step"], **values})
            result = {
                **key,
                "above_1_2": found.above_slight,
                "above_1_5": found.above_severe,
                "max_loss_ratio": f"{found.max_loss_ratio:.3f}",
                "max_loss_ratio_step": found.max_loss_ratio_step,
                "max_ppl_fluctuation": f"{largest:.3f}",
                "max_ppl_fluctuation_step": at,
                "max_grad_norm": f"{max(row['grad_norm'] for row in steps):.3g}",
                "max_sqrt_v": f"{found.max_sqrt_v:.4g}",
            }
            append_csv(path, result)
            print(*result.values(), flush=True)


def read_csv(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def append_csv(path: Path, row: dict[str, object]) -> None:
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


def curve_of(path: Path) -> list[tuple[int, float]]:
    """(step, validation loss in nats) of a run."""
    frame = read_metrics(path)
    known = frame[frame["val_loss"].notna()]
    return [(int(step), float(loss)) for step, loss in zip(known["step"], known["val_loss"], strict=True)]


def write_table(path: Path, recipes: Sequence[str], seeds: Sequence[int]) -> None:
    """stability.csv: one line per run."""
    rows = []
    for recipe in recipes:
        for seed in seeds:
            run = run_path(name_of(recipe, seed))
            if not is_finished(run):
                continue
            found: Stability = measure_run(run)
            frame, curve = read_metrics(run), curve_of(run)
            largest, at = fluctuation(curve)
            steps = frame[frame["step"] > 0]
            rows.append(
                {
                    "recipe": recipe,
                    "seed": seed,
                    "steps": int(frame["step"].iloc[-1]),
                    "tokens": int(frame["tokens"].iloc[-1]),
                    "tokens_discarded": int(frame["tokens_discarded"].iloc[-1]),
                    "train_seconds": round(float(frame["train_seconds"].iloc[-1]), 1),
                    "loss_ratio_above_1_2": found.above_slight,
                    "loss_ratio_above_1_5": found.above_severe,
                    "max_loss_ratio": round(found.max_loss_ratio or math.nan, 3),
                    "max_loss_ratio_step": found.max_loss_ratio_step,
                    "max_ppl_fluctuation": round(largest, 3),
                    "max_ppl_fluctuation_step": at,
                    "max_grad_norm": round(float(steps["grad_norm"].max()), 2),
                    "max_sqrt_v": f"{found.max_sqrt_v:.4g}",
                    "max_sqrt_v_l1": f"{steps['adam_sqrt_v_l1'].max():.4g}",
                    **{
                        f"r_{column}": "" if entry is None else f"{entry.r:.2f}"
                        for column, entry in found.correlations.items()
                    },
                    **{
                        f"p_{column}": "" if entry is None else f"{entry.p:.1g}"
                        for column, entry in found.correlations.items()
                    },
                    "final_val_loss": round(curve[-1][1], 4),
                    "best_val_loss": round(min(loss for _, loss in curve), 4),
                }
            )
    if rows:
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            table.writeheader()
            table.writerows(rows)
        print(path.read_text())


def write_alarms(path: Path, rows_path: Path) -> None:
    """alarms.json: over the recorded first steps, how early a warning came before each jump of the loss (a loss ratio above 1.2 after
    one of at most 1.05), and how often no jump followed within ten steps."""
    within = 10
    runs: dict[tuple[str, str, str], list[dict[str, float]]] = {}
    for row in read_csv(rows_path):
        key = (row["setting"], row["arm"], row["seed"])
        runs.setdefault(key, []).append({name: float(row[name]) for name in ("step", "loss", "grad_norm")})
    results = []
    for threshold in (3.0, 4.0, 6.0, 10.0):
        jumps, leads, false_alarms, warnings, spikes = 0, [], 0, 0, 0
        for rows in runs.values():
            warning, alarm = EarlyWarning(ratio=threshold), SpikeAlarm()
            steps = [{**row, "step": int(row["step"])} for row in rows]
            warned = [row["step"] for row in steps if warning.read(row)]
            spikes += sum(alarm.read(row) is not None for row in steps)
            began, inside = [], False
            best = math.inf
            for row in steps:
                if not math.isfinite(row["loss"]):
                    continue
                ratio, best = row["loss"] / best, min(best, row["loss"])
                if ratio > 1.2 and not inside:
                    began.append(row["step"])
                inside = ratio > (1.05 if inside else 1.2)
            jumps += len(began)
            warnings += len(warned)
            for step in began:
                if lead := [step - at for at in warned if 0 <= step - at <= within]:
                    leads.append(max(lead))
            false_alarms += sum(not any(0 <= step - at <= within for step in began) for at in warned)
        results.append(
            {
                "gradient_norm_above_usual": threshold,
                "runs": len(runs),
                "steps": sum(map(len, runs.values())),
                "jumps": jumps,
                "jumps_warned_of_before": sum(lead > 0 for lead in leads),
                "jumps_warned_of_in_the_same_step": leads.count(0),
                "median_lead_steps": statistics.median([lead for lead in leads if lead] or [0]),
                "warnings": warnings,
                "warnings_without_a_jump_within_10_steps": false_alarms,
                "spike_alarms": spikes,
            }
        )
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(path.read_text())


def write_first_steps_table(path: Path) -> None:
    """Prints a Markdown table of first-steps.csv: how many runs were unstable by each measure, and the probability of so large a
    difference to the large batch by chance (Fisher's exact test, two-sided)."""
    from scipy.stats import fisher_exact

    rows = read_csv(path)

    def unstable(row: dict[str, str]) -> bool:
        return float(row["max_loss_ratio"]) > 1.2 or float(row["max_ppl_fluctuation"]) > 1.3

    print("| setting | arm | seeds | loss ratio > 1.2 | > 1.5 | perplexity > 1.3 x best | either | median largest ratio | p |")
    print("|---|---|---|---|---|---|---|---|---|")
    for setting, arm in FIRST_ARMS:
        own = [row for row in rows if (row["setting"], row["arm"]) == (setting, arm)]
        base = [row for row in rows if (row["setting"], row["arm"]) == (setting, "large batch")]
        if not own or not base:
            continue
        ratios = [float(row["max_loss_ratio"]) for row in own]
        bad, bad_base = sum(map(unstable, own)), sum(map(unstable, base))
        p = fisher_exact([[bad, len(own) - bad], [bad_base, len(base) - bad_base]]).pvalue
        print(
            f"| {setting} | {arm} | {len(own)} | {sum(ratio > 1.2 for ratio in ratios)} | {sum(ratio > 1.5 for ratio in ratios)} | "
            f"{sum(float(row['max_ppl_fluctuation']) > 1.3 for row in own)} | {bad} | {statistics.median(ratios):.2f} | "
            f"{'' if arm == 'large batch' else f'{p:.3f}'} |"
        )


def draw(path: Path, recipes: Sequence[str], seeds: Sequence[int], until: int = 60) -> None:
    """curves.png: the first steps' loss, gradient norm and max sqrt(v), and the whole validation curve by tokens."""
    if not any(is_finished(run_path(name_of(recipe, seed))) for recipe in recipes for seed in seeds):
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(9, 6.2), dpi=90)
    panels = (
        ("loss", "training loss (nats), first steps", False),
        ("grad_norm", "gradient norm, first steps", True),
        ("adam_sqrt_v_max", "max sqrt(v), first steps", True),
    )
    for index, recipe in enumerate(recipes):
        for seed in seeds:
            run = run_path(name_of(recipe, seed))
            if not is_finished(run):
                continue
            frame = read_metrics(run)
            label = recipe if seed == seeds[0] else None
            first = frame[(frame["step"] > 0) & (frame["step"] <= until)]
            for axis, (column, title, log) in zip(axes.flat, panels, strict=False):
                axis.plot(first["step"], first[column], color=f"C{index}", linewidth=0.9, label=label, alpha=0.8)
                axis.set_title(title, fontsize=9)
                if log:
                    axis.set_yscale("log")
            known = frame[frame["val_loss"].notna()]
            axes[1, 1].plot(known["tokens"] / 1e3, known["val_loss"], color=f"C{index}", linewidth=0.9, alpha=0.8)
            axes[1, 1].set_title("validation loss (nats, full length), by thousand tokens", fontsize=9)
    axes[0, 0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report-only", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS))
    parser.add_argument("--first-settings", nargs="*", default=["steep", "tuned"])
    parser.add_argument("--first-seeds", type=int, nargs="*", default=list(FIRST_SEEDS), help="seeds of the first steps")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    options = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    if not options.report_only:
        train_first_steps(OUT / "first-steps.csv", options.first_settings, options.first_seeds)
        train_all(options.recipes, options.seeds)
        for recipe in ("small-slw", "small-batch-warmup") if options.seeds else ():
            if recipe in options.recipes:
                start = ["--set", "seq_len_warmup.start=8"] if recipe == "small-slw" else []
                efftrain("tune-warmup", "--recipe", recipe, *start)
    write_table(OUT / "stability.csv", options.recipes, options.seeds)
    write_first_steps_table(OUT / "first-steps.csv")
    write_alarms(OUT / "alarms.json", OUT / "first-steps-rows.csv")
    draw(OUT / "curves.png", options.recipes, options.seeds)


if __name__ == "__main__":
    main()
