"""What a checkpoint costs: seconds that saving blocks training, and the share of them that the
manifest takes (F54).

    python benchmarks/speed/checkpoint_cost.py [--layers 12 --width 768 --context 1024 --vocab
    50257] [--saves 3]

The state is that of GPT-2 117M by default: fp32 weights and both of Adam's moments, 1.49 GB;
`--folder` says where.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import statistics
import tempfile
import time
from datetime import date
from pathlib import Path

import torch

from efftrain_cli.foundation.section import parse_duration
from efftrain_cli.recipe.recipe import dump_recipe, load_recipe
from efftrain_cli.training import checkpoint
from efftrain_cli.training.build import build_state


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("layers", 12),
        ("width", 768),
        ("context", 1024),
        ("vocab", 50257),
        ("saves", 3),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--folder", type=Path, default=Path("."), help="a folder on the disk to measure"
    )
    options = parser.parse_args()
    shape = [f"n_layer={options.layers}", f"n_head={options.width // 64}"]
    shape += [f"n_embd={options.width}", f"seq_len={options.context}"]
    recipe = load_recipe("small", [f"model.{key}" for key in shape])
    state = build_state(recipe, options.vocab, torch.device("cpu"))
    model = state.model
    names = ("optimizer.safetensors", "model.safetensors")
    files = dict(zip(names, (state.optimizer.tensors(), state.weights()), strict=True))

    kinds = ("save", "save, CPU", "without hashes", "without hashes, CPU", "read and verify")
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    sha256_of = checkpoint.sha256_of
    folder = Path(tempfile.mkdtemp(prefix=".checkpoint-cost.", dir=options.folder))
    try:
        for number in range(
            -1, options.saves
        ):  # number -1 warms the disk cache up and does not count
            for kind in ("without hashes", "save"):
                checkpoint.sha256_of = sha256_of if kind == "save" else lambda path: ""
                path = folder / f"step-{number + 1:08d}"
                start, cpu = time.perf_counter(), time.process_time()
                checkpoint.write(path, state.progress, dump_recipe(recipe), files)
                seconds[kind].append(time.perf_counter() - start)
                seconds[f"{kind}, CPU"].append(time.process_time() - cpu)
                if kind == "save":
                    start = time.perf_counter()
                    checkpoint.load(path, state, recipe)
                    seconds["read and verify"].append(time.perf_counter() - start)
                size = sum(file.stat().st_size for file in path.iterdir())
                shutil.rmtree(path)
            if number < 0:
                seconds = {kind: [] for kind in kinds}
    finally:
        shutil.rmtree(folder)
    save, bare = statistics.median(seconds["save"]), statistics.median(seconds["without hashes"])
    print(
        f"{date.today()}  {platform.processor() or platform.machine()}, {torch.get_num_threads()}"
        f" threads, torch {torch.__version__}"
    )
    print(
        f"checkpoint of {sum(p.numel() for p in model.parameters()):,} parameters:"
        f" {size / 1e9:.2f} GB"
    )
    for name, values in seconds.items():
        print(
            f"{name:<20} {statistics.median(values):6.2f} s  (of"
            f" {', '.join(f'{value:.2f}' for value in values)})"
        )
    # On a machine that does other work too, the CPU's share says more than the wall's.
    cpu, bare_cpu = (
        statistics.median(seconds[kind]) for kind in ("save, CPU", "without hashes, CPU")
    )
    print(
        f"manifest             {max(0.0, save - bare) / save:6.1%} of a save's wall time,"
        f" {(cpu - bare_cpu) / cpu:.1%} of its CPU time (at most 25 %)"
    )
    default = parse_duration("10min")
    print(
        f"blocks training      {save / (default + save):6.1%} at the default interval of 10 min (at"
        " most 5 %)"
    )


if __name__ == "__main__":
    main()
