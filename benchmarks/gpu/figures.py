"""Twelve figures of efftrain on one GPU, in the order of `__main__.LIMITS`."""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from benchmarks.gpu.measuring import Bench, Training, repeated
from benchmarks.gpu.peer import peer
from benchmarks.gpu.process import NeedsCuda, Note
from efftrain_cli.bench import phase_seconds
from efftrain_cli.run.directory import RunDirectory
from efftrain_cli.training.build import build_state
from efftrain_cli.training.checkpoint import begin_save
from efftrain_cli.training.compiling import compile_seconds

LARGE = "train.batch_size=512"
"""524,288 tokens a step."""
MICRO = "train.micro_batch_tokens"
SMALL = (
    "model.n_layer=2",
    "model.seq_len=256",
    "train.batch_size=16",
    "train.micro_batch_tokens=2048",
)


# --- call 1 ---------------------------------------------------------------------------------------


def device(bench: Bench, note: Note) -> None:
    note(torch=torch.__version__, python=sys.version.split()[0], cpus=os.cpu_count())
    size, length, times = (256, 1 << 20, 3) if bench.smoke else (8192, 1 << 31, 50)
    if not bench.smoke:
        facts = torch.cuda.get_device_properties(0)
        note(device=facts.name, memory_gib=facts.total_memory / 2**30, cuda=torch.version.cuda)
        note(cudnn=torch.backends.cudnn.version())
        query = ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"]
        with contextlib.suppress(OSError):
            answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False)
            note(driver_and_power=answer.stdout.strip())
        try:  # without a C compiler, say: what then follows is uncompiled rather than nothing
            torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device="cuda"))
            note(compiles=True)
        except Exception as error:
            note(compiles=False, compiler=str(error)[-300:])
    a = torch.randn(size, size, device=bench.device).bfloat16()
    note(matmul_tflops=2 * size**3 / repeated(bench, lambda: a @ a, times) / 1e12)
    source = torch.empty(length, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    seconds = repeated(bench, lambda: target.copy_(source), times)
    note(copy_tb_per_second=2 * length / seconds / 1e12)


def gpt2(bench: Bench, note: Note) -> None:
    training = Training(bench, LARGE, f"{MICRO}=65_536")
    rate = training.rate()
    note(**rate, **against_peer(bench, rate))
    rows = (training.rows(1)[0] for _ in iter(int, 1))
    phases = phase_seconds(rows, bench.device, rate["step_seconds"])
    work = phases["forward"] + phases["backward"] + phases["optimizer"]
    note(outside_share=1 - work / sum(phases.values()), phases=phases)


def micro_batch(bench: Bench) -> int:
    """Tokens of the faster micro-batch that was measured: 64 or 32 sequences of 1024."""
    figures = bench.results.figures
    rates = {n: figures.get(n, {}).get("tokens_per_second", 0) for n in ("gpt2", "gpt2_32")}
    return 65_536 if rates["gpt2"] >= rates["gpt2_32"] and rates["gpt2"] else 32_768


def against_peer(bench: Bench, rate: dict[str, Any]) -> dict[str, float]:
    """The rate in FLOPs of the model, over the peer's."""
    other = bench.results.figures.get("peer", {})
    if "tokens_per_second" not in other:
        return {}
    theirs = other["tokens_per_second"] * other["flops_per_token"]
    return {"over_peer_per_flop": rate["tokens_per_second"] * rate["flops_per_token"] / theirs}


def llama(bench: Bench, note: Note) -> None:
    """The peer's closest twin: RMS norms, rotary positions, norms of q and k, untied, Muon."""
    twin = ["model.arch=llama", "model.n_head=6", "model.d_ff=2048", "model.qk_norm=true"]
    twin += ["model.tied=false", "optim.name=muon", "optim.muon_lr=0.02"]
    twin.append(f"{MICRO}={micro_batch(bench)}")
    rate = Training(bench, LARGE, *twin, tiny=["model.d_ff=128"]).rate(steps=6)
    note(**rate, **against_peer(bench, rate))


GRADIENT_LIMIT = 0.15
"""Largest relative error of a parameter's gradient. A lost gradient's error is 1."""


def gradients(bench: Bench, note: Note) -> None:
    """Each parameter's gradient of one step in bf16 against fp32 on the CPU."""
    small = [*SMALL, "train.batch_size=8", "optim.grad_clip=0.0"]
    narrow = Training(bench, *small, "train.dtype=bf16")
    config = narrow.state.model.config
    shards = narrow.windows.shards
    batches = []
    batch_of = narrow.windows.batch

    def keep(*arguments: Any) -> Any:
        batches.append(batch_of(*arguments))
        return batches[-1]

    narrow.windows.batch = keep  # type: ignore[method-assign]
    got = narrow.gradients()
    plain = ["train.dtype=fp32", "train.compile=off"]
    cpu = torch.device("cpu")
    reference = Training(bench, *small, *plain, device=cpu, shards=shards, vocab=config.vocab_size)
    want = reference.gradients()
    lost = {n: torch.zeros_like(x) if n.endswith("ln_1.bias") else x for n, x in want.items()}
    note(**gradient_errors(got, want))
    note(lost_ln_1_bias_fails=not gradient_errors(lost, want)["ok"])
    for name, value in gradient_errors(sharded_gradients(bench, narrow, batches[0]), want).items():
        note(**{f"sharded_{name}": value})


def gradient_errors(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the largest relative errors ||a - b|| / ||b|| by parameter, and whether all are below
    the limit: the norm of all gradients together would hide a small one that is lost."""
    tiny = 1e-30
    errors = {n: float((got[n] - b).norm() / b.norm().clamp(min=tiny)) for n, b in want.items()}
    worst = dict(sorted(errors.items(), key=lambda item: -item[1])[:3])
    ok = max(errors.values()) < GRADIENT_LIMIT
    return {"worst": worst, "median": statistics.median(errors.values()), "ok": ok}


def sharded_gradients(bench: Bench, training: Training, batch: Any) -> dict[str, Tensor]:
    """The same gradient through FSDP2 with bf16 weights, in a group of one rank."""
    backend = "gloo" if bench.smoke else "nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        vocab = training.state.model.config.vocab_size
        model: Any = build_state(training.recipe, vocab, bench.device).model
        policy = MixedPrecisionPolicy()
        if not bench.smoke:  # layer norms of bf16 weights and fp32 inputs are CUDA's
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        for module in (*model.h, model):
            fully_shard(module, mp_policy=policy)
        register_fsdp_forward_method(model, "loss_sum")
        tokens, targets = (ids.to(bench.device) for ids in (batch.tokens, batch.targets))
        with torch.autocast(bench.device.type, torch.bfloat16):
            loss = model.loss_sum(tokens, targets) / targets.numel()
        loss.backward()
        return {n: p.grad.full_tensor().float().cpu() for n, p in model.named_parameters()}
    finally:
        dist.destroy_process_group()


def resume(bench: Bench, note: Note) -> None:
    """20 steps whole against 10, a checkpoint, and 10 more."""
    half = 3 if bench.smoke else 10
    shards = bench.shards(512)
    for label, deterministic in (("deterministic", "true"), ("any_kernels", "false")):
        sets = [*SMALL, "model.n_embd=384", "model.n_head=6"]
        sets.append(f"train.deterministic={deterministic}")
        ends = []
        for stops in ((2 * half,), (half, 2 * half)):
            path = None
            for stop in stops:
                training = Training(bench, *sets, until=stop, load=path, shards=shards, vocab=512)
                training.rows(stop - training.state.progress.step + (path is None))
                path = bench.folder / f"{label}-{len(stops)}-{stop}"
                training.save(path)
            state = training.state
            assert state.progress.step == 2 * half
            tensors = {**state.weights(), **state.optimizer.tensors()}
            ends.append({name: tensor.detach().float().cpu() for name, tensor in tensors.items()})
        whole, halves = ends
        equal = all(torch.equal(whole[name], halves[name]) for name in whole)
        largest = max(float((whole[name] - halves[name]).abs().max()) for name in whole)
        note(**{f"{label}_bits_equal": equal, f"{label}_largest_difference": largest})
    torch.use_deterministic_algorithms(False)


def host_reads(bench: Bench, note: Note) -> None:
    """Steps in which anything that waits for the device raises."""
    cases = {
        "baseline": [],
        "slw": ["seq_len_warmup={start = 8, steps = 40}"],
        "pld": ["progressive_layer_drop={theta = 0.5, steps = 4}"],
        "muon": ["optim.name=muon", "optim.muon_lr=0.02"],
    }
    for label, sets in cases.items():
        training = Training(bench, *SMALL, *sets)
        training.rows(8)
        bench.wait()
        if not bench.smoke:
            torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(5):
                next(training.records)
            note(**{label: "none"})
        except RuntimeError as error:
            stack = traceback.extract_tb(error.__traceback__)
            ours = [f"{Path(f.filename).name}:{f.lineno}" for f in stack if "_cli" in f.filename]
            note(**{label: f"{' < '.join(reversed(ours[-4:]))}: {str(error).splitlines()[0][:80]}"})
        finally:
            if not bench.smoke:
                torch.cuda.set_sync_debug_mode("default")
    if bench.smoke:
        raise NeedsCuda


def gpt2_32(bench: Bench, note: Note) -> None:
    """As gpt2, in the recipe's own micro-batches: their logits are indexed with 32 bits."""
    rate = Training(bench, LARGE, f"{MICRO}=32_768").rate(steps=6)
    note(**rate, **against_peer(bench, rate))


# --- call 2 ---------------------------------------------------------------------------------------


def lengths(bench: Bench, note: Note) -> None:
    """Three lengths of a warmup; those below the full one share a graph."""
    lengths = [16, 32, 64] if bench.smoke else [128, 512, 1024]
    each = 3 if bench.smoke else 7
    phases = f"lengths = {lengths}, until = [{1 + each}, {1 + 2 * each}]"
    warmup = f"seq_len_warmup={{pacing = 'discrete', {phases}}}"
    training = Training(bench, LARGE, f"{MICRO}={micro_batch(bench)}", warmup)
    graphs, seconds = counters["stats"]["unique_graphs"], compile_seconds()
    rates = {}
    for length in lengths:
        timed = training.timed(each)
        assert timed[-1][1]["seq_len"] == length
        quiet = statistics.median(seconds for seconds, _ in timed[2:])
        rates[length] = length * timed[-1][1]["batch_size"] / quiet
        note(**{f"tokens_per_second_{length}": rates[length]})
    for n in lengths[:-1]:
        allowed = training.flops(lengths[-1]) / training.flops(n)
        note(**{f"ratio_{n}": rates[n] / rates[lengths[-1]], f"ratio_{n}_by_flops": allowed})
    note(graphs=counters["stats"]["unique_graphs"] - graphs)
    note(compile_seconds=compile_seconds() - seconds)


def methods(bench: Bench, note: Note) -> None:
    """What layer dropping saves, and what SimiGrad's measurement costs."""
    size = 8 if bench.smoke else micro_batch(bench) // 512  # two micro-batches
    two = [f"train.batch_size={size}", f"{MICRO}={micro_batch(bench)}"]
    section = f"target = 0.5, min_batch_size = {size}, max_batch_size = {size}, quantum = {size}"
    training = Training(bench, *two, f"simigrad={{{section}, interval = 10, window = 1}}")
    training.timed(2)
    times = [seconds for seconds, _ in training.timed(20)]
    plain = statistics.median(times)
    note(plain_step_seconds=plain, simigrad_step_seconds=statistics.mean(times))
    note(simigrad_measuring_costs=sorted(times)[-2] / plain - 1)  # two of the 20 measure
    seq_len = training.recipe.model.seq_len
    dense = training.flops(seq_len)
    training = Training(bench, *two, "progressive_layer_drop={theta = 0.5, steps = 1}")
    training.timed(6)
    timed = training.timed(24)
    seconds = statistics.mean(seconds for seconds, _ in timed)
    tokens = size * seq_len
    flops = statistics.mean(row["flops"] - row["optimizer_flops"] for _, row in timed)
    note(pld_step_seconds=seconds, pld_flops_share=flops / (dense * tokens))
    note(pld_time_share=seconds / plain)


def large(bench: Bench, note: Note) -> None:
    """GPT-2 1.5B, one micro-batch a step, activations computed again and stored."""
    state = None
    for label, again in (("recomputed", "true"), ("stored", "false")):
        for sequences in (16, 8):
            sets = [f"train.batch_size={sequences}", f"train.micro_batch_tokens={sequences * 1024}"]
            sets += [f"train.activation_checkpointing={again}"]
            training = Training(bench, *sets, name="gpt2-1.5b", state=state)
            state = training.state  # drawing 1.5 billion weights takes the host a while
            bench.kept = training
            try:
                rate = training.rate(warmup=2, steps=5)
            except torch.OutOfMemoryError as error:
                traceback.clear_frames(error.__traceback__)
                state.model.zero_grad(set_to_none=True)
                note(**{f"{label}_{sequences}": "out of memory"})
                continue
            keep_rate(note, label, rate)
            note(**{f"{label}_sequences": sequences})
            break


def checkpoint(bench: Bench, note: Note) -> None:
    """Seconds that a checkpoint of 1.5B keeps training waiting, and those of writing it beside."""
    training = bench.kept or Training(bench, name="gpt2-1.5b")
    bench.kept = None
    free = shutil.disk_usage(bench.folder).free
    note(disk_free_gb=free / 1e9)
    if free < 25e9 and not bench.smoke:
        raise RuntimeError("too little room on the disk for 19 GB")
    state = training.state
    folder = bench.folder / "run"
    folder.mkdir()
    host: dict[str, dict[str, Tensor]] = {}
    with RunDirectory(folder) as run:
        for label in ("first", "later"):  # the first allocates host memory
            state.progress = state.progress._replace(step=state.progress.step + 1)
            bench.wait()
            start = time.perf_counter()
            writing = begin_save(run, state, training.recipe, host)
            note(**{f"{label}_stops_training_seconds": time.perf_counter() - start})
            bench.wait()
            note(**{f"{label}_copied_seconds": time.perf_counter() - start})
        assert writing is not None
        seconds = writing.write()
    size = sum(file.stat().st_size for file in writing.path.iterdir())
    note(write_seconds=seconds, gigabytes=size / 1e9, gb_per_second=size / 1e9 / seconds)
    shutil.rmtree(folder)


def medium(bench: Bench, note: Note) -> None:
    """350M, one micro-batch of 32 x 1024 a step, compiled whole, activations stored and computed
    again."""
    sets = ["model.n_layer=24", "model.n_head=16", "model.n_embd=1024"]
    sets += ["train.batch_size=32", "train.micro_batch_tokens=32_768"]
    for label, again in (("stored", "false"), ("recomputed", "true")):
        training = Training(bench, *sets, f"train.activation_checkpointing={again}")
        keep_rate(note, label, training.rate(warmup=2, steps=6))


def keep_rate(note: Note, label: str, rate: dict[str, Any]) -> None:
    """Note the main values of a rate."""
    for name in ("tokens_per_second", "mfu", "peak_gib", "compile_seconds"):
        if name in rate:
            note(**{f"{label}_{name}": rate[name]})


def pair(bench: Bench, note: Note) -> None:
    """A baseline and a length warmup on real text, as many seconds each: one seed, no claim."""
    text = bytearray()
    for path in sorted(Path(os.__file__).parent.rglob("*.py")):
        text += path.read_bytes() + b"\0"
        if len(text) > (300_000 if bench.smoke else 30_000_000):
            break
    shards = bench.shards(257, np.frombuffer(bytes(text), dtype=np.uint8))
    sets = ["model.n_layer=6", "model.n_head=6", "model.n_embd=384", "model.seq_len=512"]
    sets += ["train.batch_size=64", "train.micro_batch_tokens=32_768", "optim.lr=1e-3"]
    sets += ["optim.warmup_steps=50", "eval={every = 50, windows = 64}"]
    tiny = ["eval={every = 10, windows = 8}", "train.batch_size=4"]
    seconds = 4.0 if bench.smoke else max(10.0, min(60.0, bench.left / 2 - 20))
    warmup = f"seq_len_warmup={{start = {8 if bench.smoke else 64}, steps = 300}}"
    curves = {}
    for label, method in (("baseline", []), ("slw", [warmup])):
        training = Training(bench, *sets, *method, tiny=tiny, shards=shards, vocab=257)
        rows, trained, began = [], 0.0, time.perf_counter()
        # Compilation is not the method's.
        while trained < seconds and time.perf_counter() - began < seconds + 25:
            rows += training.rows(10)
            trained = rows[-1]["train_seconds"]
        curves[label] = [row for row in rows if row.get("val_loss") is not None]
        last = curves[label][-1]
        note(**{f"{label}_{name}": last[name] for name in ("step", "tokens", "val_loss")})
        note(**{f"{label}_train_seconds": last["train_seconds"]})
    equal = min(rows[-1]["tokens"] for rows in curves.values())
    for label, rows in curves.items():
        nearest = min(rows, key=lambda row: abs(row["tokens"] - equal))
        note(**{f"{label}_val_loss_at_{equal:,}_tokens": nearest["val_loss"]})


FIGURES = {
    "device": device,
    "peer": peer,
    "gpt2": gpt2,
    "llama": llama,
    "gradients": gradients,
    "resume": resume,
    "host_reads": host_reads,
    "gpt2_32": gpt2_32,
    "lengths": lengths,
    "methods": methods,
    "large": large,
    "checkpoint": checkpoint,
    "medium": medium,
    "pair": pair,
}
