"""The runs behind docs/evidence/progressive-layer-dropping.md: about 12 CPU minutes, resumable.

    python benchmarks/evidence_pld.py [--seeds 3]

Prints the tables; rows are kept in docs/evidence/progressive-layer-dropping.csv. Every arm's learning rate decays to the
end of its own budget.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from evidence_runs import run_arms, table

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "evidence" / "progressive-layer-dropping.csv"
COMMON = (
    "model.n_layer=6",
    "model.n_embd=64",
    "model.seq_len=64",
    'data.tokenizer="bpe:512"',
    "eval.every=10000",
    "eval.windows=512",
    "optim.warmup_steps=25",
)
TOKENS, STEPS = 500_736, 489
# Six blocks at theta 0.5 run 4.25 on average (4.27 with the ramp), and the logits always: counted with `plan_run`, so many more
# tokens cost what the dense model's 489 steps cost.
DROPPED_TOKENS, DROPPED_STEPS = 679_936, 664
CONSTANT_TOKENS = 683_008
SHALLOW_TOKENS = 719_872
ARMS = {
    "dense": (f"train.tokens={TOKENS}",),
    "dropping, equal tokens": (f"train.tokens={TOKENS}", f"progressive_layer_drop={{theta=0.5, steps={STEPS}}}"),
    "dropping, equal FLOPs": (
        f"train.tokens={DROPPED_TOKENS}",
        f"progressive_layer_drop={{theta=0.5, steps={DROPPED_STEPS}}}",
    ),
    "constant theta, equal FLOPs": (
        f"train.tokens={CONSTANT_TOKENS}",
        "progressive_layer_drop={theta=0.5, steps=0}",
    ),
    "four blocks, equal FLOPs": (f"train.tokens={SHALLOW_TOKENS}", "model.n_layer=4"),
    # The batch fits one micro-batch, so the gates above are drawn once a step; here, four times.
    "dropping, equal FLOPs, four draws a step": (
        f"train.tokens={DROPPED_TOKENS}",
        f"progressive_layer_drop={{theta=0.5, steps={DROPPED_STEPS}}}",
        "train.micro_batch_tokens=256",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    rows = run_arms(RESULTS, "small", COMMON, ARMS, range(1, parser.parse_args().seeds + 1))
    print(table(rows, "dense"))


if __name__ == "__main__":
    main()
