"""What emulated accumulators cost: steps of `small` (4 blocks of 128) with each setting, in turns,
in processor time.

    python benchmarks/speed/accumulation_cost.py [--steps 10]

Every setting narrows all three products of every linear layer in the blocks; the head stays plain.
One micro-batch of 4,096 tokens a step, vocabulary 1024, one thread.
"""

from __future__ import annotations

import argparse
import statistics

from step_time import median_ratio, take_turns

from efftrain_cli.recipe.recipe import load_recipe


def section(bits: int, chunk: int, operands: str = "fp32") -> str:
    roles = ", ".join(
        f"{role} = {{bits = {bits}, chunk = {chunk}}}"
        for role in ("forward", "grad_input", "grad_weight")
    )
    return f'chunked_accumulation={{operands = "{operands}", {roles}}}'


PLAIN = "plain fp32"
SETTINGS = {
    "no roles": "chunked_accumulation={}",
    "9 bits, whole": section(9, 0),
    "9 bits, chunks of 64": section(9, 64),
    "the same, fp8_e5m2 operands": section(9, 64, operands="fp8_e5m2"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10)
    steps = parser.parse_args().steps
    shape = ["train.tokens=1e9", "eval.every=1000000"]
    recipes = {PLAIN: load_recipe("small", shape)}
    recipes |= {
        name: load_recipe("small", [*shape, override]) for name, override in SETTINGS.items()
    }
    taken = take_turns(recipes, 1024, steps)
    print(
        f"{steps} steps each, one thread; processor seconds, and median ratios of steps taken in"
        " turns"
    )
    for name in recipes:
        seconds = statistics.median(step.seconds for step in taken[name])
        print(
            f"{name:34} {1000 * seconds:7.0f} ms a step  "
            f" {median_ratio(taken[name], taken[PLAIN]):5.2f} x plain"
        )


if __name__ == "__main__":
    main()
