"""Measure how many bits a real model's sums need; compare with theory.

    python benchmarks/accumulation.py RUN [--error 0.04] [--operands fp8_e5m2]

The model of a checkpoint makes one forward and backward pass over the next micro-batch of its
training data. Every linear layer has three products. Of each, some outputs are drawn, and their
sums are made again from the same products: exactly, and in accumulators of few bits, rounded after
every addition in order, whole and in chunks. Operands are first rounded to their format, so the
errors are those of the accumulation alone.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efftrain_cli.foundation.files import make_folder, write_whole
from efftrain_cli.methods.variance_retention import MANTISSA_BITS, needed_bits, product_bits
from efftrain_cli.model.gpt import GPT
from efftrain_cli.model.losses import capped
from efftrain_cli.model.narrow_matmul import to_operand
from efftrain_cli.plan.plan import full_plan
from efftrain_cli.run.names import find_run
from efftrain_cli.training.loading import TrainedModel, load_trained_model
from efftrain_cli.training.session import choose_device, prepare_session

BITS = tuple(range(4, 13))
"""Mantissa bits that are tried."""
CHUNKS = (0, 16, 32, 64, 128, 256)
"""Chunk lengths that are tried; 0: one sum."""
PAPERS_CHUNK = 64
_SUMS = 1 << 14
"""Running sums worked on at once in each width: they and their scratch stay in a CPU's cache."""
_EXPONENT = 0x7F800000
"""The exponent bits of fp32: a number without its sign and mantissa is its power of two."""
SAMPLES = 4096
"""Outputs drawn from each product."""


def micro_batch(trained: TrainedModel) -> tuple[Tensor, Tensor]:
    """Return tokens and targets of a full micro-batch from the checkpoint's place in its data."""
    recipe = trained.recipe
    session = prepare_session(recipe, trained.model.device)
    seq_len = trained.model.config.seq_len
    sequences = min(recipe.train.batch_size, max(1, recipe.train.micro_batch_tokens // seq_len))
    plan = full_plan(recipe, sequences, seq_len, trained.model.config.n_layer)
    plan = plan._replace(window_start=trained.progress.windows)
    batch = session.train_data.batch(plan).to(trained.model.device)
    return batch.tokens, batch.targets


def measure_model(
    model: GPT, tokens: Tensor, targets: Tensor, measure: Measure
) -> list[dict[str, Any]]:
    """Return the rows of all layers, by role.

    layer, role; n: products in a sum; product_bits: mantissa bits of an exact product; bits, chunk:
    of the accumulator; relative_error: norm of the errors over the norm of the exact sums;
    vrr_bits: bits that theory asks for with that chunk.
    """
    rows: list[dict[str, Any]] = []
    hooks = []
    inputs = {}

    def keep(name: str, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        inputs[name] = args[0].detach().flatten(0, -2)

    def use(name: str, layer: nn.Linear, _: object, grads: tuple[Tensor, ...]) -> None:
        grad = grads[0].detach().flatten(0, -2)
        rows.extend(measure.layer(name, inputs.pop(name), layer.weight.detach(), grad))

    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            hooks.append(layer.register_forward_hook(partial(keep, name)))
            hooks.append(layer.register_full_backward_hook(partial(use, name)))
    # The embedding's output asks for a gradient, so that the first layer's hook is called too.
    x = model.run_blocks(model.embed(tokens))
    x = model.before_head(x).flatten(0, -2)
    weight = model.head_weight
    logits = F.linear(x, weight)
    logits.retain_grad()
    real = logits[:, : model.config.vocab_size].float()
    F.cross_entropy(capped(real, model.config.softcap), targets.flatten()).backward()
    for hook in hooks:
        hook.remove()
    assert logits.grad is not None
    rows += measure.layer("head", x.detach(), weight.detach(), logits.grad)
    model.zero_grad(set_to_none=True)
    return sorted(rows, key=lambda row: row["role"])


@dataclass
class Measure:
    """Draws outputs of a layer's products and sums them again."""

    operands: str
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def layer(self, name: str, x: Tensor, weight: Tensor, grad: Tensor) -> Iterator[dict[str, Any]]:
        """Yield the rows of the products: x (tokens, in), weight (out, in), grad (tokens, out)."""
        x, _ = to_operand(x.float(), self.operands)
        weight, _ = to_operand(weight.float(), self.operands)
        grad, _ = to_operand(grad.float(), self.operands)
        bits = product_bits(self.operands, self.operands)
        for role, a, b in (
            ("forward", x, weight.t()),
            ("grad_input", grad, weight),
            ("grad_weight", grad.t(), x),
        ):
            n = a.shape[1]
            for measured in self.product(a, b):
                yield {
                    "layer": name,
                    "role": role,
                    "n": n,
                    "product_bits": bits,
                    **measured,
                    "vrr_bits": needed_bits(bits, n, measured["chunk"]),
                }

    def product(self, a: Tensor, b: Tensor) -> Iterator[dict[str, Any]]:
        """Yield what was measured of some outputs of `a` (m, n) times `b` (n, columns), for all
        bits and chunks."""
        rows = torch.randint(a.shape[0], (SAMPLES,), generator=self.generator).to(a.device)
        columns = torch.randint(b.shape[1], (SAMPLES,), generator=self.generator).to(a.device)
        terms = a.t().index_select(1, rows).mul_(b.index_select(1, columns))  # (n, samples)
        exact = terms.sum(dim=0, dtype=torch.float64)
        for chunk in CHUNKS:
            # Sums no longer than a chunk are whole.
            sums = sums_in_order(terms, BITS, chunk).double()
            errors = (sums - exact).norm(dim=1) / exact.norm().clamp_min(1e-30)
            for bits, error in zip(BITS, errors.tolist(), strict=True):
                yield {"bits": bits, "chunk": chunk, "relative_error": error}


def needs_of(sums: pd.DataFrame, error: float) -> pd.DataFrame:
    """Return a row per role and layer: what its sums need for a relative error of at most `error`.

    Columns beside those of `sums` that hold for all bits and chunks:
        vrr, vrr_chunked: bits by theory, whole and in chunks of 64. bits, bits_chunked: bits by
        measurement; one above the most tried if none suffices.
    """
    products = sums.groupby(["role", "layer"], sort=False)
    needs = products[["n", "product_bits"]].first()
    enough = sums[sums.relative_error <= error]
    for chunk, ending in ((0, ""), (PAPERS_CHUNK, "_chunked")):
        theory = sums[sums.chunk == chunk].groupby(["role", "layer"]).vrr_bits
        needs[f"vrr{ending}"] = theory.first()
        fewest = enough[enough.chunk == chunk].groupby(["role", "layer"]).bits.min()
        needs[f"bits{ending}"] = fewest.reindex(needs.index, fill_value=BITS[-1] + 1)
    return needs.reset_index()


def lines(needs: pd.DataFrame) -> Iterator[str]:
    """Yield the table of needs with its meaning."""
    yield needs.to_string(index=False, float_format="{:.3g}".format)
    yield (
        "bits by theory (VRR, v < 50) and by measurement"
        f" ({BITS[-1] + 1}: more than were tried), whole and in chunks of {PAPERS_CHUNK}"
    )
    columns = ["bits", "bits_chunked", "vrr", "vrr_chunked"]
    yield needs.groupby("role", sort=False)[columns].max().to_string()


def sums_in_order(
    terms: Tensor,
    widths: Sequence[int],
    chunk: int = 0,
) -> Tensor:
    """Sum `terms` over their first dimension, in order, rounding to nearest after every addition,
    in accumulators of several widths at once.

    The running sums lie in fp32: an addition is rounded twice, to 23 bits and to the width, which
    seldom matters if the width is far smaller.

    Args:
        terms: (n, samples), fp32, below 2^100.
        widths: mantissa bits of the accumulators.
        chunk: sums of so many terms first, then the sum of those, rounded likewise; 0: one sum.

    Returns:
        (widths, samples), fp32.
    """
    # Adding and subtracting 1.5 x 2^(23 - bits) times a number's power of two rounds it, to even,
    # in two passes.
    of_widths = [1.5 * 2.0 ** (23 - bits) for bits in widths]
    factors = torch.tensor(of_widths, device=terms.device).view(-1, 1, 1)

    def add_in_order(steps: Tensor, shape: tuple[int, ...]) -> Tensor:
        total = steps.new_zeros(shape)
        power = torch.empty_like(total)
        for step in steps:
            total.add_(step)
            torch.bitwise_and(
                total.view(torch.int32),
                _EXPONENT,
                out=power.view(torch.int32),
            )
            total.addcmul_(power, factors)
            total.addcmul_(power, factors, value=-1)
        return total

    n = terms.shape[0]
    chunk = min(chunk or n, n)
    chunks = math.ceil(n / chunk)
    sums = []
    for samples in terms.split(max(16, _SUMS // chunks), dim=1):
        # A sum does not change by adding zeros. (chunk, chunks, samples)
        filled = F.pad(samples, (0, 0, 0, chunks * chunk - n))
        steps = filled.view(chunks, chunk, -1).transpose(0, 1)
        partial = add_in_order(steps, (len(widths), *steps.shape[1:]))
        if chunks > 1:
            steps = partial.transpose(0, 1).unsqueeze(2)
            partial = add_in_order(steps, (len(widths), 1, partial.shape[2]))
        sums.append(partial[:, 0])
    return torch.cat(sums, dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="name of a run")
    parser.add_argument(
        "--error",
        type=float,
        default=0.04,
        help="relative error allowed in a product; the theory's threshold is at about 0.04",
    )
    parser.add_argument("--operands", choices=MANTISSA_BITS, default="fp8_e5m2")
    options = parser.parse_args()

    path = find_run(options.run)
    trained = load_trained_model(path.name, None, choose_device("auto"))
    measure = Measure(options.operands)
    tokens, targets = micro_batch(trained)
    sums = pd.DataFrame(measure_model(trained.model, tokens, targets, measure))
    print(
        f"{path.name}, step {trained.progress.step}, {tokens.numel():,} tokens,"
        f" {options.operands} operands, relative error of at most {options.error:g}"
    )
    print("\n".join(lines(needs_of(sums, options.error))))
    table = path / "accumulation" / f"step-{trained.progress.step:08d}.csv"
    make_folder(table.parent)
    write_whole(table, sums.to_csv(index=False, lineterminator="\n"))
    print(f"written: {table}")


if __name__ == "__main__":
    main()
