"""What the figures share: a device with its folders and results, and a training that is timed."""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._dynamo.utils import counters

from benchmarks.gpu.process import SCRATCH, Results
from efftrain_cli.bench import wait_for
from efftrain_cli.data.corpus import ShardWriter, TokenShards
from efftrain_cli.data.windows import Windows
from efftrain_cli.model.flops import flops_per_token, peak_flops
from efftrain_cli.recipe.recipe import dump_recipe, load_recipe
from efftrain_cli.training import checkpoint, loading
from efftrain_cli.training.build import build_state
from efftrain_cli.training.compiling import compile_seconds
from efftrain_cli.training.record import read_records
from efftrain_cli.training.stages import train_stages
from efftrain_cli.training.state import TrainState

VOCAB = 50257


class Bench:
    """A worker's device, folders and results."""

    def __init__(self, out: Path, smoke: bool, peer: Path | None) -> None:
        self.smoke = smoke
        self.peer_file = peer
        self.results = Results(out)
        self.device = torch.device("cpu" if smoke else "cuda")
        self._temporary = tempfile.TemporaryDirectory(dir=SCRATCH)
        self.folder = Path(self._temporary.name)
        self.kept: Training | None = None
        """A training that the next figure goes on with."""
        self.deadline = 0.0

    @property
    def left(self) -> float:
        """Seconds that the running figure still has."""
        return self.deadline - time.time()

    @property
    def peak(self) -> float:
        """Dense bf16 peak of the card; that of an H100 and an H200 if its name is unknown."""
        return peak_flops(torch.cuda.get_device_name(), "bf16") or 989.5e12

    def wait(self) -> None:
        wait_for(self.device)

    def free(self) -> None:
        """Give memory back before the next training, whose peak is to be known."""
        gc.unfreeze()  # a training freezes what its compiler leaves
        gc.collect()
        if not self.smoke:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def shards(self, vocab: int, tokens: Any = None) -> TokenShards:
        """Write token shards: random tokens unless some are given."""
        if tokens is None:
            count = 200_000 if self.smoke else 6_000_000
            tokens = np.random.Generator(np.random.Philox(0)).integers(0, vocab - 1, count)
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        writer = ShardWriter(folder / "tokens.bin", vocab)
        writer.add(np.asarray(tokens, dtype=np.uint32))
        writer.close()
        return TokenShards(writer.path, writer.split, vocab)


class Training:
    """A training of a recipe with other settings, on random tokens unless shards are given."""

    def __init__(
        self,
        bench: Bench,
        *sets: str,
        name: str = "gpt2-117m",
        tiny: Sequence[str] = (),
        device: torch.device | None = None,
        shards: TokenShards | None = None,
        vocab: int = VOCAB,
        until: int | None = None,
        load: Path | None = None,
        state: TrainState | None = None,
    ) -> None:
        """Begin it, or go on with `state`. Without `until` step 0 is not evaluated.

        Args:
            tiny: settings of a smoke run, besides a tiny model's.
            load: a checkpoint.
        """
        bench.free()
        self.bench = bench
        self.device = device or bench.device
        compiles = bench.results.figures.get("device", {}).get("compiles", True)
        settings = ["optim.warmup_steps=10", "eval={every = 1_000_000, windows = 1}"]
        # Neither may be decided silently, by "auto".
        settings += [f"train.compile={'on' if compiles else 'off'}"]
        settings += ["train.activation_checkpointing=false", *sets]
        if bench.smoke:
            settings += ["model.n_layer=2", "model.n_embd=64", "model.n_head=2", "model.seq_len=64"]
            settings += ["train.batch_size=8", "train.micro_batch_tokens=256", "train.compile=off"]
            settings += tiny
            vocab = min(vocab, 512)
        self.recipe = load_recipe(name, settings)
        self.windows = Windows(
            shards or bench.shards(vocab),
            self.recipe.model.seq_len,
            self.recipe.seed,
            pin_memory=self.device.type == "cuda",
        )
        self.state = state or build_state(self.recipe, vocab, self.device)
        if load is not None:
            loading.load(load, self.state, self.recipe)
        if until is None:
            self.state.progress = self.state.progress._replace(step=1, schedule_step=1)
        validation = self.windows.validation(1)
        self.records: Iterator[Any] = train_stages(
            self.state, self.recipe, self.windows, validation, until
        )

    def rows(self, steps: int) -> list[dict[str, Any]]:
        records = [next(self.records) for _ in range(steps)]
        return read_records(self.state, self.recipe, records)

    def timed(self, steps: int) -> list[tuple[float, dict[str, Any]]]:
        """Return (seconds, row) of whole steps: data, gradient, clipping, update, row."""
        timed = []
        for _ in range(steps):
            self.bench.wait()
            start = time.perf_counter()
            (row,) = self.rows(1)
            self.bench.wait()
            timed.append((time.perf_counter() - start, row))
        return timed

    def flops(self, seq_len: int) -> float:
        """Return FLOPs per token, 6 N + 12 L C T."""
        config = self.state.model.config
        return flops_per_token(config, seq_len, config.n_layer).with_logits

    def rate(self, warmup: int = 3, steps: int = 8) -> dict[str, Any]:
        """Time whole steps after a warm-up; MFU is over the dense bf16 peak."""
        if self.bench.smoke:
            warmup, steps = 1, 2
        compiling = compile_seconds()
        graphs = counters["stats"]["unique_graphs"]
        start = time.perf_counter()
        self.timed(warmup)
        rate: dict[str, Any] = {"warmup_seconds": time.perf_counter() - start}
        rate["compile_seconds"] = compile_seconds() - compiling
        rate["graphs"] = counters["stats"]["unique_graphs"] - graphs
        timed = self.timed(steps)
        times = [seconds for seconds, _ in timed]
        row = timed[-1][1]
        tokens = row["seq_len"] * row["batch_size"]
        median = statistics.median(times)
        per_token = self.flops(row["seq_len"])
        rate |= {"tokens_per_second": tokens / median, "step_seconds": median}
        rate |= {"fastest": min(times), "slowest": max(times), "flops_per_token": per_token}
        rate["loss"] = row["loss"]
        if self.device.type == "cuda":
            rate["mfu"] = per_token * tokens / median / self.bench.peak
            rate["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return rate

    def gradients(self) -> dict[str, torch.Tensor]:
        """Make one step; return the gradients that its update took, fp32 on the CPU."""
        taken = {}
        step = self.state.optimizer.step

        def keep(*arguments: Any) -> None:
            for name, parameter in self.state.model.named_parameters():
                assert parameter.grad is not None
                taken[name] = parameter.grad.detach().float().cpu()
            step(*arguments)

        self.state.optimizer.step = keep  # type: ignore[method-assign]
        self.rows(1)
        return taken

    def save(self, path: Path) -> None:
        """Write a checkpoint."""
        model, optimizer, _ = self.state.whole()
        files = {"optimizer.safetensors": optimizer, "model.safetensors": model}
        checkpoint.write(path, self.state.progress, dump_recipe(self.recipe), files)


def repeated(bench: Bench, function: Callable[[], object], times: int) -> float:
    """Return the seconds of a call, after three to warm up."""
    for _ in range(3):
        function()
    bench.wait()
    start = time.perf_counter()
    for _ in range(times):
        function()
    bench.wait()
    return (time.perf_counter() - start) / times
