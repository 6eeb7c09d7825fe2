"""Evidence for docs/evidence/staged-training.md: grown models against models trained from scratch, at equal FLOPs.

    python benchmarks/evidence_staged.py --runs runs-evidence --out docs/evidence      # about 15 minutes of one core
    python benchmarks/evidence_staged.py --runs runs-evidence --out docs/evidence --summary

Every run is an ordinary run directory: a finished one is skipped, an interrupted one is resumed. The summary writes
staged-training.csv (a row per run) and staged-training.svg (validation loss over FLOPs).
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
from pathlib import Path
from statistics import mean, stdev

TARGET = (4, 4, 32)
"""n_layer, n_head, n_embd of the model that every comparison ends with."""
SEQ_LEN, BATCH, STEPS, SWITCH, VOCAB = 32, 16, 1500, 500, 512
STEP_TOKENS = SEQ_LEN * BATCH
SHALLOW, NARROW = (2, 4, 32), (4, 2, 16)

# name -> (first model, operator or None, moments, symmetry, depth)
CONDITIONS: dict[str, tuple[tuple[int, int, int], str | None, str, str, str]] = {
    "scratch": (TARGET, None, "", "", ""),
    "depth": (SHALLOW, "depth", "ema", "offdiag", "zero_out_proj"),
    "depth-reset": (SHALLOW, "depth", "reset", "offdiag", "zero_out_proj"),
    "depth-copy": (SHALLOW, "depth", "ema", "offdiag", "copy_interleave"),
    "width": (NARROW, "width", "ema", "offdiag", ""),
    "width-reset": (NARROW, "width", "reset", "offdiag", ""),
    "width-symmetric": (NARROW, "width", "ema", "none", ""),
    "shallow": (SHALLOW, None, "", "", ""),
    "narrow": (NARROW, None, "", "", ""),
}


def flops_per_step(shape: tuple[int, int, int]) -> float:
    from efftrain_cli.model.flops import flops_per_token

    return flops_per_token(shape[2], SEQ_LEN, VOCAB, shape[0]).with_logits * STEP_TOKENS


def overrides_of(condition: str, lr: float) -> list[str]:
    """The condition as overrides of recipes/small.toml. All end when the FLOPs of STEPS steps of TARGET are spent, and all
    at min_lr."""
    from efftrain_cli.methods.staged_growth import default_schedule_ratio, parse_operator

    first, operator, moments, symmetry, depth = CONDITIONS[condition]
    share = flops_per_step(first) / flops_per_step(TARGET)
    model = TARGET
    if operator is None:
        model, steps = first, round(STEPS / share)
        schedule_tokens = steps * STEP_TOKENS
    else:
        after = round(STEPS - share * SWITCH)
        steps = SWITCH + after
        ratio = default_schedule_ratio([parse_operator(operator)])
        schedule_tokens = round(ratio * SWITCH * STEP_TOKENS) + after * STEP_TOKENS
    values = [
        *(f"model.{key}={value}" for key, value in zip(("n_layer", "n_head", "n_embd"), model, strict=True)),
        f"model.seq_len={SEQ_LEN}",
        f"data.tokenizer=bpe:{VOCAB}",
        f"optim.lr={lr}",
        "optim.min_lr=0.0",
        f"optim.decay_tokens={schedule_tokens}",
        f"train.tokens={steps * STEP_TOKENS}",
        f"train.batch_size={BATCH}",
        "train.dtype=fp32",
        "eval.every=50",
        "eval.windows=128",
        "checkpoint.every=30s",
        "checkpoint.keep=1",
    ]
    if operator is not None:
        stage = f"model={{n_layer={first[0]}, n_head={first[1]}, n_embd={first[2]}}}"
        values += [
            f"staged_growth.moments={moments}",
            f"staged_growth.symmetry={symmetry}",
            f"staged_growth.depth={depth or 'zero_out_proj'}",
            f'stages=[{{{stage}, switch={{rule="steps", value={SWITCH}}}}}, {{operators=["{operator}"], rewarmup_steps=20}}]',
        ]
    return values


def run_name(condition: str, seed: int) -> str:
    return f"staged-{condition}-seed{seed}"


def train_one(condition: str, seed: int, lr: float) -> None:
    from efftrain_cli.pretrain import resume, start
    from efftrain_cli.recipe.recipe import load_recipe
    from efftrain_cli.run.directory import run_path

    name = run_name(condition, seed)
    if (run_path(name) / "recipe.toml").exists():
        if not is_finished(name):
            resume(name, with_probe=False)
        return
    recipe = load_recipe("small", [*overrides_of(condition, lr), f"seed={seed}"])
    start(recipe, recipe_name=f"staged-{condition}", name=name, with_probe=False)


def is_finished(name: str) -> bool:
    from efftrain_cli.run.directory import run_path

    events = run_path(name) / "events.jsonl"
    if not events.exists():
        return False
    return any(json.loads(line).get("status") == "finished" for line in events.read_text().splitlines())


def rows_of(name: str) -> list[dict]:
    """Rows with a validation loss, the last of a step."""
    from efftrain_cli.run.directory import run_path

    by_step = {}
    for line in (run_path(name) / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        by_step[row["step"]] = row
    return [by_step[step] for step in sorted(by_step) if by_step[step]["val_loss"] is not None]


def asymmetry_of(name: str) -> float:
    """How much the two copies of a widened model differ in its last checkpoint: 0 equal, of order 1 gone their own ways."""
    from safetensors.torch import load_file

    from efftrain_cli.methods.growth_operators import width_asymmetry
    from efftrain_cli.run.directory import checkpoints_of, run_path

    return width_asymmetry(load_file(checkpoints_of(run_path(name))[-1] / "model.safetensors"), 2)


def summarize(seeds: list[int], out: Path) -> None:
    done = {c: [s for s in seeds if is_finished(run_name(c, s))] for c in CONDITIONS}
    curves = {(c, s): rows_of(run_name(c, s)) for c, found in done.items() for s in found}
    with (out / "staged-training.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        columns = ["loss_at_growth", "worst_after_growth", "copies_differ_by"]
        writer.writerow(["condition", "seed", "tokens", "total_flops", "val_loss", *columns])
        for (condition, seed), rows in curves.items():
            at = after = differ = ""
            if CONDITIONS[condition][1] == "width":
                differ = f"{asymmetry_of(run_name(condition, seed)):.2g}"
            if CONDITIONS[condition][1]:
                at = f"{next(row['val_loss'] for row in rows if row['step'] == SWITCH):.4f}"
                after = f"{max(row['val_loss'] for row in rows if SWITCH < row['step'] <= SWITCH + 200):.4f}"
            last = rows[-1]
            writer.writerow(
                [condition, seed, last["tokens"], f"{last['total_flops']:.6g}", f"{last['val_loss']:.4f}", at, after, differ]
            )
    print("| condition | tokens | FLOPs | validation loss | minus scratch, 95 % interval |\n|---|---|---|---|---|")
    for condition, found in done.items():
        if not found:
            continue
        last = [curves[condition, s][-1] for s in found]
        losses = [row["val_loss"] for row in last]
        paired = [s for s in found if s in done["scratch"]]
        differences = [curves[condition, s][-1]["val_loss"] - curves["scratch", s][-1]["val_loss"] for s in paired]
        text = "–"
        if condition != "scratch" and len(differences) > 1:
            from scipy.stats import t

            half = t.ppf(0.975, len(differences) - 1) * stdev(differences) / math.sqrt(len(differences))
            text = f"{mean(differences):+.4f} ± {half:.4f}"
        shown = ", ".join(f"{loss:.4f}" for loss in losses)
        print(f"| {condition} | {last[0]['tokens']:,} | {last[0]['total_flops']:.4g} | {mean(losses):.4f} ({shown}) | {text} |")
    plot(done, curves, out / "staged-training.svg")


def plot(done: dict[str, list[int]], curves: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.fonttype"] = "none"
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axis, kind, alone in zip(axes, ("depth", "width"), ("shallow", "narrow"), strict=True):
        for condition in ("scratch", alone, *(c for c in CONDITIONS if c.startswith(kind))):
            if not done[condition]:
                continue
            runs = [curves[condition, seed] for seed in done[condition]]
            flops = [row["total_flops"] for row in runs[0]]
            losses = [mean(row["val_loss"] for row in at) for at in zip(*runs, strict=True)]
            style = {"scratch": ("black", 2.0), alone: ("gray", 2.0)}.get(condition, (None, 1.2))
            axis.plot(flops, losses, label=condition, color=style[0], linewidth=style[1])
        axis.set(xscale="log", xlabel="FLOPs, logits included", title=kind, ylim=(None, 5.0), xlim=(1e10, None))
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("validation loss, nats per token")
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default="runs", help="folder of the runs")
    parser.add_argument("--out", type=Path, default=Path("docs/evidence"))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--only", nargs="*", choices=list(CONDITIONS), default=list(CONDITIONS))
    parser.add_argument("--summary", action="store_true", help="train nothing")
    arguments = parser.parse_args()
    os.environ["EFFTRAIN_RUNS"] = arguments.runs
    seeds = arguments.seeds
    if not arguments.summary:
        import torch

        torch.set_num_threads(1)
        for seed in seeds:
            for condition in arguments.only:
                train_one(condition, seed, arguments.lr)
    arguments.out.mkdir(parents=True, exist_ok=True)
    summarize(seeds, arguments.out)


if __name__ == "__main__":
    main()
