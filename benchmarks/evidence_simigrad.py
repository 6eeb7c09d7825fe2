"""The runs behind docs/evidence/simigrad.md: about 10 CPU minutes, resumable.

    python benchmarks/evidence_simigrad.py [--seeds 3]

Prints the table; rows are kept in docs/evidence/simigrad.csv. All arms train on the same number of tokens, which with one
model is the same number of FLOPs. The fixed batches scale the learning rate as SimiGrad does, by the square root.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from evidence_runs import run_arms, table

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "evidence" / "simigrad.csv"
COMMON = (
    "model.n_layer=6",
    "model.n_embd=64",
    "model.seq_len=64",
    'data.tokenizer="bpe:512"',
    "eval.every=10000",
    "eval.windows=512",
    "optim.warmup_steps=25",
    "train.tokens=500_736",
)


def fixed(batch_size: int) -> tuple[str, ...]:
    return (f"train.batch_size={batch_size}", f"optim.lr={2e-3 * math.sqrt(batch_size / 16):.6g}")


ARMS = {
    "fixed batch 16": fixed(16),
    "SimiGrad from 16": (
        "simigrad={target=0.2, min_batch_size=8, max_batch_size=64, quantum=2, interval=2, window=4}",
    ),
    "fixed batch 20": fixed(20),  # about SimiGrad's mean batch, so about as many steps
    "fixed batch 8": fixed(8),
    "fixed batch 32": fixed(32),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    rows = run_arms(RESULTS, "small", COMMON, ARMS, range(1, parser.parse_args().seeds + 1))
    print(table(rows, "fixed batch 16"))


if __name__ == "__main__":
    main()
