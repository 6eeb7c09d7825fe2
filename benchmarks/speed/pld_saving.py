"""Does a skipped block save the time that its FLOPs are worth? Whole training steps, with and
without layer dropping.

    python benchmarks/speed/pld_saving.py [--steps 40] [--vocab 512]

Prints the share of FLOPs and of CPU seconds that layer dropping saves at theta 0.5, n_layer 6,
n_embd 384, seq_len 256, batch 8.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from step_time import six_by_384, take_turns

from efftrain_cli.methods.progressive_layer_drop import ProgressiveLayerDrop


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--vocab", type=int, default=512)
    arguments = parser.parse_args()
    dense = six_by_384()
    dropping = replace(dense, progressive_layer_drop=ProgressiveLayerDrop(theta=0.5, steps=0))
    taken = take_turns({"dense": dense, "dropping": dropping}, arguments.vocab, arguments.steps)
    seconds = {
        name: sum(step.seconds for step in steps) / len(steps) for name, steps in taken.items()
    }
    flops = {name: sum(step.flops for step in steps) / len(steps) for name, steps in taken.items()}
    flops_saved = 1 - flops["dropping"] / flops["dense"]
    time_saved = 1 - seconds["dropping"] / seconds["dense"]
    # The mean over a few dozen draws differs from the expectation; seconds per FLOP do not, so both
    # are of the same steps.
    print(f"vocabulary {arguments.vocab}, {arguments.steps} steps each, 1 thread")
    print(f"dense     {seconds['dense'] * 1e3:8.1f} ms CPU per step  {flops['dense']:.4e} FLOPs")
    print(
        f"dropping  {seconds['dropping'] * 1e3:8.1f} ms CPU per step  {flops['dropping']:.4e} FLOPs"
    )
    print(
        f"saved     {flops_saved:.1%} of the FLOPs, {time_saved:.1%} of the time:"
        f" {time_saved / flops_saved:.0%} of it arrives"
    )


if __name__ == "__main__":
    main()
