"""Sequence length warmup on a CUDA device: throughput by length, compilations and stalls, resume, and one pair of runs at the
size of gpt2-117m, scaled down to 200 million tokens each. About 25 minutes on an H100-class device.

    python benchmarks/gpu_slw.py --train TEXT.jsonl --tokenizer gpt2 --out gpu-slw.json
    python benchmarks/gpu_slw.py --rehearse --out /tmp/rehearsal.json       the same at toy size, on any device

Each part's result is written as soon as it is there; a run that exists is continued or left alone. One seed: the pair is a demonstration
that the recipes run at this size, and no claim about the method.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from efftrain_cli.run import run_path
from efftrain_cli.run_reader import read_events, read_metrics

FULL = {
    "lengths": (8, 16, 64, 128, 256, 512, 1024),
    "tokens_per_step": 65_536,
    "bench_steps": 20,
    "pair": {
        # The published schedule at 1/786 of its tokens: 763 steps of 256 x 1024 for 37,500 of 4096 x 1024.
        "train.tokens": "200_000_000",
        "optim.decay_tokens": "200_000_000",
        "train.batch_size": "256",
        "optim.warmup_steps": "61",
        "eval.every": "25",
        "eval.windows": "128",
        "checkpoint.every": "200",
    },
    "warmup_steps": 407,
    "cut": (200, 250),
}
TOY = {
    "lengths": (8, 64),
    "tokens_per_step": 512,
    "bench_steps": 2,
    "pair": {
        "model.n_layer": "2",
        "model.n_embd": "32",
        "model.n_head": "2",
        "model.seq_len": "64",
        "train.tokens": "20_000",
        "optim.decay_tokens": "20_000",
        "train.batch_size": "16",
        "train.micro_batch_tokens": "1024",
        "optim.warmup_steps": "4",
        "eval.every": "5",
        "eval.windows": "4",
        "checkpoint.every": "8",
    },
    "warmup_steps": 15,
    "cut": (10, 16),
}


def efftrain(*arguments: str) -> str:
    """Runs the command and returns its standard output, which is shown as well.

    Raises:
        RuntimeError: it failed.
    """
    print("efftrain", *arguments, flush=True)
    result = subprocess.run(
        [sys.executable, "-m", "efftrain_cli", *arguments], stdout=subprocess.PIPE, text=True, check=False
    )
    print(result.stdout, flush=True)
    if result.returncode:
        raise RuntimeError(f"efftrain {' '.join(arguments)} ended with exit code {result.returncode}")
    return result.stdout


def overrides(settings: dict[str, str]) -> list[str]:
    return [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]


def throughput(size: dict, data: dict[str, str], device: str) -> dict[str, object]:
    """Tokens/s of a step of equal tokens at each length."""
    found = {}
    shape = {key: value for key, value in size["pair"].items() if key.startswith("model.")}
    for length in size["lengths"]:
        settings = {
            **data,
            **shape,
            "model.seq_len": str(length),
            "train.batch_size": str(size["tokens_per_step"] // length),
            "train.micro_batch_tokens": str(size["tokens_per_step"]),
        }
        text = efftrain(
            *("bench", "--recipe", "gpt2-117m-large-batch", "--device", device, "--steps", str(size["bench_steps"])),
            *("--format", "json", *overrides(settings)),
        )
        result = json.loads(text[text.index("{") :])
        found[str(length)] = {
            key: result[key] for key in ("tokens_per_second", "mfu", "peak_memory_bytes", "device", "torch", "compiled")
        }
    return found


def train(name: str, recipe: str, settings: dict[str, str], device: str, *more: str) -> Path:
    path = run_path(name)
    events = read_events(path)
    if any(event.get("event") == "end" and event.get("status") == "finished" for event in events):
        return path
    if (path / "recipe.toml").exists():
        efftrain("pretrain", "--resume", name, "--device", device, *more)
    else:
        efftrain("pretrain", "--recipe", recipe, "--name", name, "--device", device, *overrides(settings), *more)
    return path


def describe(path: Path) -> dict[str, object]:
    """A run's result, its compilations, and its slowest steps against others of the same length."""
    frame = read_metrics(path)
    steps = frame[frame["step"] > 0]
    by_length = steps.groupby("seq_len")["tokens_per_second"].median()
    # A step at a new length against the median of the steps within 20 of it: a stall would stand out.
    seconds = steps["seconds"].tolist()
    lengths = steps["seq_len"].tolist()
    slowest = max(
        (
            seconds[i] / statistics.median(seconds[max(0, i - 20) : i + 20])
            for i in range(3, len(seconds))
            if lengths[i] != lengths[i - 1]
        ),
        default=None,
    )
    return {
        "steps": int(frame["step"].iloc[-1]),
        "tokens": int(frame["tokens"].iloc[-1]),
        "train_seconds": float(frame["train_seconds"].iloc[-1]),
        "compile_seconds": float(steps["compile_seconds"].sum()) if "compile_seconds" in steps else None,
        "steps_that_compiled": int((steps["compile_seconds"] > 0).sum()) if "compile_seconds" in steps else None,
        "lengths": int(steps["seq_len"].nunique()),
        "slowest_step_at_a_new_length_over_its_neighbours": slowest,
        "tokens_per_second_at_full_length": float(by_length.iloc[-1]),
        "loss_ratio_above_1.2": int((steps["loss_ratio"] > 1.2).sum()),
        "max_loss_ratio": float(steps["loss_ratio"].max()),
        "final_val_loss": float(frame["val_loss"].dropna().iloc[-1]),
    }


def resume_difference(whole: Path, cut: Path, first: int, last: int) -> dict[str, object]:
    """Largest relative difference of the loss in the steps after a resume."""
    frames = [read_metrics(path).set_index("step")["loss"].loc[first + 1 : last] for path in (whole, cut)]
    difference = ((frames[0] - frames[1]).abs() / frames[0]).max()
    return {"steps": len(frames[0]), "largest_relative_difference_of_the_loss": float(difference)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", default="stdlib", help="text to train on; the standard library is 200 million tokens only by repetition")
    parser.add_argument("--tokenizer", default="bpe:4096")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    size = TOY if options.rehearse else FULL
    data = {"data.train": options.train, "data.tokenizer": options.tokenizer, "data.repeat": "true"}
    result: dict[str, object] = json.loads(options.out.read_text()) if options.out.exists() else {}

    def keep(part: str, value: object) -> None:
        result[part] = value
        options.out.write_text(json.dumps(result, indent=1) + "\n")

    if "throughput_by_length" not in result:
        keep("throughput_by_length", throughput(size, data, options.device))
    pair = {**data, **size["pair"]}
    warmup = {**pair, "seq_len_warmup.start": "8", "seq_len_warmup.steps": str(size["warmup_steps"])}
    prefix = "rehearsal-" if options.rehearse else "gpu-"
    first, last = size["cut"]
    slw = train(f"{prefix}slw", "gpt2-117m-slw", warmup, options.device)
    keep("slw", describe(slw))
    cut = train(f"{prefix}slw-cut", "gpt2-117m-slw", warmup, options.device, "--steps", str(first))
    if int(read_metrics(cut)["step"].iloc[-1]) < last:
        efftrain("pretrain", "--resume", cut.name, "--device", options.device, "--steps", str(last))
    keep("resume", resume_difference(slw, cut, first, last))
    keep("large-batch", describe(train(f"{prefix}large-batch", "gpt2-117m-large-batch", pair, options.device)))
    keep("note", "one seed: no claim")
    print(options.out.read_text())


if __name__ == "__main__":
    main()
