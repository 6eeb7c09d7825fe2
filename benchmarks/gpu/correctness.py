"""Each fast path against its reference, on a smaller model of the same kind, parameter by
parameter; attention's and the head's times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.measuring import (
    Bench,
    Figure,
    Part,
    check,
    check_gradients,
    figure,
    recipe_for,
    relative,
    repeated_seconds,
    training,
)
from efftrain_cli.model.cross_entropy import summed_cross_entropy
from efftrain_cli.model.gpt import GPT
from efftrain_cli.model.kernels import attention_kernels
from efftrain_cli.plan.cost import likely_vocabulary
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.training.build import build_state
from efftrain_cli.training.compiling import full_micro_batch
from efftrain_cli.training.objective import Objective

Gradients = dict[str, Tensor | None]
"""Gradient of each parameter, by its name."""
LIMITS = {"fp32": 1e-3, "bf16": 0.2}
"""Largest relative error that a parameter's gradient may have, by the dtype of the arithmetic. A
lost gradient's error is 1."""


def shapes_of(recipe: Recipe) -> list[tuple[int, int]]:
    """(sequences, seq_len): the full micro-batch, which has a graph of its own, and others, which
    share one."""
    full = full_micro_batch(recipe, 1)
    assert full is not None
    sequences, seq_len = full
    return [full, (sequences - 1, seq_len * 3 // 4), (2 * sequences, seq_len // 8)]


@dataclass(frozen=True, kw_only=True)
class Form:
    """One way to compute the loss."""

    dtype: str
    compiled: str = ""
    """"whole", "blocks" or "": eager."""
    residual: torch.dtype = torch.float32
    plain_head: bool = False


def gradient_function(
    bench: Bench, recipe: Recipe, form: Form
) -> Callable[[tuple[int, int]], tuple[float, Gradients]]:
    """Return a function of (sequences, seq_len) that gives loss and gradients of fixed weights and
    tokens."""
    vocab_size = likely_vocabulary(recipe.data.tokenizer)
    compile_ = "off"
    if form.compiled:
        compile_ = "on"
    used = replace(recipe, train=replace(recipe.train, dtype=form.dtype, compile=compile_))
    state = build_state(used, vocab_size, bench.device)
    model = state.model
    model.residual_dtype = form.residual
    if form.plain_head:
        model.head_loss_sum = plain_head_of(model)  # type: ignore[method-assign]
    with (
        mock.patch(
            "efftrain_cli.training.compiling.BACKEND", "aot_eager" if bench.smoke else "inductor"
        ),
        mock.patch(
            "efftrain_cli.training.objective.compiles_blocks",
            lambda *_: form.compiled == "blocks",
        ),
    ):
        minimized = Objective(used, state).compute

    def gradients(shape: tuple[int, int]) -> tuple[float, Gradients]:
        generator = torch.Generator().manual_seed(3)
        tokens = torch.randint(vocab_size, shape, generator=generator).to(bench.device)
        model.zero_grad(set_to_none=True)
        with attention_kernels(bench.device, same_shape=shape == full_micro_batch(used, 1)):
            loss = minimized(tokens, tokens, None, None)["loss"] / tokens.numel()
            loss.backward()
        return float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}

    return gradients


def forms(bench: Bench) -> Iterator[Figure]:
    """Loss and each parameter's gradient of every form against fp32 by the plain head, at every
    kind of shape."""
    recipe = recipe_for(bench, sequences=8)
    if not bench.smoke:
        recipe = replace(recipe, model=replace(recipe.model, n_layer=2, seq_len=512))
    truths = {}
    truth = gradient_function(bench, recipe, Form(dtype="fp32", plain_head=True))
    for shape in shapes_of(recipe):
        truths[shape] = truth(shape)
    narrow = torch.bfloat16
    ways = {
        "bf16 eager, plain head": Form(dtype="bf16", plain_head=True),
        "bf16 eager, one-buffer head": Form(dtype="bf16"),
        "bf16 eager, bf16 residual": Form(dtype="bf16", residual=narrow),
        "bf16 compiled whole, bf16 residual": Form(dtype="bf16", compiled="whole", residual=narrow),
        "bf16 compiled blocks, bf16 residual": Form(
            dtype="bf16", compiled="blocks", residual=narrow
        ),
        "fp32 eager, one-buffer head": Form(dtype="fp32"),
        "fp32 compiled whole": Form(dtype="fp32", compiled="whole"),
        "fp32 compiled blocks": Form(dtype="fp32", compiled="blocks"),
    }
    for name, form in ways.items():
        way = gradient_function(bench, recipe, form)
        for shape in shapes_of(recipe):
            want_loss, want = truths[shape]
            loss, got = way(shape)
            label = f"{name}, {shape[0]} x {shape[1]}"
            loss_limit = 1e-5 if form.dtype == "fp32" else 2e-3
            yield check(f"{label}: loss", abs(loss - want_loss) / want_loss, loss_limit)
            yield check_gradients(f"{label}: gradients", got, want, LIMITS[form.dtype])


def plain_head_of(model: GPT) -> Callable[[Tensor, Tensor], Tensor]:
    def head(x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(
            model.head(x).flatten(0, -2).float(), targets.flatten(), reduction="sum"
        )

    return head


def attention(bench: Bench) -> Iterator[Figure]:
    """Each attention kernel in bf16, output and gradients, against plain arithmetic in fp32; and
    its time."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shape = (2, 2, 32, 16) if bench.smoke else (16, 12, 1024, 64)
    generator = torch.Generator().manual_seed(4)
    q, k, v, up = (torch.randn(shape, generator=generator).to(bench.device) for _ in range(4))

    def outputs(backend: SDPBackend, dtype: torch.dtype) -> list[Tensor]:
        inputs = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        with sdpa_kernel([backend]):
            y = F.scaled_dot_product_attention(*inputs, is_causal=True)
            y.backward(up.to(dtype))
        return [y.detach(), *(x.grad for x in inputs if x.grad is not None)]

    truth = outputs(SDPBackend.MATH, torch.float32)
    for backend in (
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ):
        name = f"attention {backend.name.lower()} bf16"
        try:
            error = relative(outputs(backend, torch.bfloat16), truth)
            seconds = repeated_seconds(
                bench, lambda backend=backend: outputs(backend, torch.bfloat16), 5
            )
        except RuntimeError as problem:
            yield figure(name, None, "", f"not available: {str(problem).splitlines()[0][:60]}")
            continue
        yield check(name, error, 1e-2)
        yield figure(
            f"{name}: forward and backward", 1000 * seconds, "ms", f"shape {shape}, inputs copied"
        )


def head(bench: Bench) -> Iterator[Figure]:
    """The head's one-buffer cross-entropy against the plain form: gradients, time, memory."""
    tokens, d, vocab, rows = (64, 16, 500, 512) if bench.smoke else (16384, 768, 50257, 50304)
    generator = torch.Generator().manual_seed(6)
    x0 = torch.randn(tokens, d, generator=generator).to(bench.device)
    w0 = (0.05 * torch.randn(rows, d, generator=generator)).to(bench.device)
    y = torch.randint(vocab, (tokens,), generator=generator).to(bench.device)

    def plain(x: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w)[:, :vocab].float(), y, reduction="sum")

    def ours(x: Tensor, w: Tensor) -> Tensor:
        return summed_cross_entropy(x, w, y, vocab)

    def gradients(form: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        x, w = x0.clone().requires_grad_(), w0.clone().requires_grad_()
        with torch.autocast(bench.device.type, dtype=torch.bfloat16):
            loss = form(x, w) / tokens
        loss.backward()
        assert x.grad is not None and w.grad is not None
        return [x.grad, w.grad]

    yield check(
        "head, one buffer against plain, bf16", relative(gradients(ours), gradients(plain)), 1e-2
    )
    compiled = {} if bench.smoke else {"plain, compiled": torch.compile(plain)}
    for name, form in {"plain": plain, "one buffer": ours, **compiled}.items():
        seconds = repeated_seconds(bench, lambda form=form: gradients(form), 5)
        memory = ""
        if bench.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(bench.device)
            held = torch.cuda.memory_allocated(bench.device)
            gradients(form)
            memory = f"{(torch.cuda.max_memory_allocated(bench.device) - held) / 2**30:.2f} GiB"
        yield figure(f"head, {name}: {tokens} x {d} x {rows}", 1000 * seconds, "ms", memory)


def skipped_step(bench: Bench) -> Iterator[Figure]:
    """A step whose gradient is not finite changes no weight, no moment and no step count, nor does
    any later one."""
    run = training(bench, recipe_for(bench))
    run.rows(2)
    run.state.nonfinite.fill_(1.0)
    before = [
        x.clone() for x in (*run.state.model.parameters(), *run.state.optimizer.tensors().values())
    ]
    run.rows(2)
    after = [*run.state.model.parameters(), *run.state.optimizer.tensors().values()]
    changed = sum(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    yield figure(
        "tensors that a skipped step changes", changed, "", "ok" if changed == 0 else "WRONG"
    )


PARTS = (
    Part("forms", forms, 140),
    Part("attention", attention, 15),
    Part("head", head, 30),
    Part("a step that is skipped", skipped_step, 50),
)
