"""GPT-2 117M with and without sequence length warmup, scaled down: one seed each, so no claim."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.gpu.measuring import Bench, Figure, Part, child_environment, figure


def _part(name: str) -> Part:
    def work(bench: Bench) -> Iterator[Figure]:
        tokens, batch, warmup = (64 * 40, 2, 10) if bench.smoke else (40_000_000, 64, 200)
        settings = [
            "data.train=stdlib",
            "data.tokenizer=bpe:8192",
            "data.repeat=true",
            f"train.tokens={tokens}",
            f"train.batch_size={batch}",
            "optim.decay_tokens=false",
            "optim.warmup_steps=30",
            "eval.windows=64",
        ]
        if name.endswith("slw"):
            settings += ["seq_len_warmup.start=8", f"seq_len_warmup.steps={warmup}"]
        if bench.smoke:
            settings += ["model.n_layer=2", "model.n_head=2", "model.n_embd=32", "model.seq_len=32"]
            settings += ["data.tokenizer=bpe:512"]
        options = [part for setting in settings for part in ("--set", setting)]
        command = [
            sys.executable,
            "-m",
            "efftrain_cli",
            "pretrain",
            "--recipe",
            name,
            "--name",
            name,
            *options,
        ]
        done = subprocess.run(
            command, env=child_environment(bench), capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(
                f"{name}: exit {done.returncode}\n{(done.stdout + done.stderr)[-1500:]}"
            )
        rows = [
            json.loads(line)
            for line in (bench.folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
        ]
        last = rows[-1]
        ratios = [row["loss_ratio"] for row in rows if row.get("loss_ratio") is not None]
        note = (
            f"{last['step']} steps, {last['train_seconds']:.0f} s, largest loss ratio"
            f" {max(ratios):.2f}; one seed: no claim"
        )
        yield figure(name, last["val_loss"], "nats, validation", note)

    return Part(name, work, 190)


PARTS = (_part("gpt2-117m-large-batch"), _part("gpt2-117m-slw"))
