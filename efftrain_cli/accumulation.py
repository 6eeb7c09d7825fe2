"""`efftrain accumulation`: how many bits the sums of a real model need, by theory and by measurement.

The model of a checkpoint makes one forward and backward pass over the next micro-batch of its training data. Every
linear layer has three products; of each, some outputs are drawn, and their sums are made again from the same products:
exactly, and in accumulators of few bits, rounded after every addition in their order, whole and in chunks. Operands are
first rounded to their format, so the errors are those of the accumulation alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efftrain_cli.compare import picture
from efftrain_cli.compare.picture import Plot
from efftrain_cli.foundation.console import table_lines
from efftrain_cli.foundation.files import csv_text, make_folder, write_whole
from efftrain_cli.methods.variance_retention import needed_bits, product_bits
from efftrain_cli.model.accumulation import sums_in_order, to_operand
from efftrain_cli.model.cross_entropy import capped
from efftrain_cli.model.gpt import GPT
from efftrain_cli.model.linear import ROLES
from efftrain_cli.plan.plan import full_plan
from efftrain_cli.training.session import choose_device, prepare_session
from efftrain_cli.training.trained_model import TrainedModel, load_trained_model

BITS = tuple(range(4, 13))
"""Mantissa bits that are tried."""
CHUNKS = (0, 16, 32, 64, 128, 256)
"""Chunk lengths that are tried; 0: none."""
PAPERS_CHUNK = 64
FAR = 6.0
"""Standard deviations from 0 beyond which a product counts as an outlier."""
MANY = 0.002
"""Share of outliers that is worth a mark: products of two normal numbers are beyond `FAR` in 0.07 % of the cases."""


@dataclass(frozen=True, kw_only=True)
class SumReport:
    """The sums of one product of one layer."""

    layer: str
    role: str
    n: int
    """Products in each sum."""
    product_bits: int
    """Mantissa bits of an exact product."""
    scales: tuple[float, float]
    """What the operands were multiplied by before they were rounded."""
    mean: float
    """|mean| / standard deviation of the products within a sum, root mean square over the sums."""
    outlier_share: float
    """Share of the products beyond `FAR` standard deviations of them all."""
    nonzero_share: float
    errors: dict[tuple[int, int], tuple[float, float]]
    """(bits, chunk) -> (relative error, signed error). Relative: norm of the errors over the norm of the exact sums.
    Signed: mean error away from zero over mean magnitude, so that lost additions are negative."""

    def theory(self, chunk: int = 0) -> int:
        """Bits that the variance retention ratio asks for."""
        return needed_bits(self.product_bits, self.n, chunk)

    def measured(self, error: float, chunk: int) -> int | None:
        """The fewest bits tried whose relative error is at most `error`; None where none of them is enough."""
        return next((bits for bits in BITS if self.errors[bits, chunk][0] <= error), None)

    def cheapest(self, error: float) -> tuple[int, int] | None:
        """(bits, chunk): the fewest bits under `error`, without chunks if that suffices, else in the longest ones that
        do."""
        found = [
            (bits, -chunk if chunk else -math.inf, chunk)
            for (bits, chunk), (relative, _) in self.errors.items()
            if relative <= error
        ]
        return None if not found else (min(found)[0], min(found)[2])

    @property
    def has_mean(self) -> bool:
        """Whether the products' mean is larger than chance makes it in sums of independent products of mean zero."""
        return self.mean > 1.5 / math.sqrt(self.n)


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """All sums of a checkpoint."""

    run: str
    step: int
    tokens: int
    """Of the micro-batch."""
    operands: str
    gradient_operands: str
    samples: int
    reports: list[SumReport]


def analyse(
    run: str,
    *,
    checkpoint: str | None = None,
    device: str = "auto",
    operands: str | None = None,
    gradient_operands: str | None = None,
    samples: int = 4096,
) -> Analysis:
    """Takes the sums of a run's checkpoint (the newest one by default) and measures them.

    Args:
        operands: format of activations and weights; None: the recipe's own where it has narrow ones, else fp8_e5m2, the
            papers'.
        samples: outputs drawn from each product.

    Raises:
        UsageError, CheckpointError, DataError: as `load_trained_model`, and where the run's training data are not
            there.
    """
    trained = load_trained_model(run, checkpoint, choose_device(device))
    section = trained.recipe.chunked_accumulation
    if operands is None:
        operands = (
            section.operands if section is not None and section.operands != "fp32" else "fp8_e5m2"
        )
        own = None if section is None or section.operands == "fp32" else section.gradient_format
        gradient_operands = gradient_operands or own
    gradient_operands = gradient_operands or operands
    tokens, targets = _micro_batch(trained)
    measure = _Measure(operands, gradient_operands, samples)
    reports = sorted(
        _sums(trained.model, tokens, targets, measure), key=lambda report: ROLES.index(report.role)
    )
    return Analysis(
        run=run,
        step=trained.progress.step,
        tokens=tokens.numel(),
        operands=operands,
        gradient_operands=gradient_operands,
        samples=samples,
        reports=reports,
    )


def _micro_batch(trained: TrainedModel) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a full micro-batch at the place in the data that the checkpoint has reached."""
    recipe, device = trained.recipe, next(trained.model.parameters()).device
    session = prepare_session(recipe, device)
    seq_len = trained.model.config.seq_len
    sequences = min(recipe.train.batch_size, max(1, recipe.train.micro_batch_tokens // seq_len))
    plan = full_plan(recipe, sequences, seq_len, trained.model.config.n_layer)
    batch = session.train_data.batch(plan._replace(window_start=trained.progress.windows)).to(
        device
    )
    return batch.tokens, batch.targets


def _sums(model: GPT, tokens: Tensor, targets: Tensor, measure: _Measure) -> list[SumReport]:
    """A report per layer and role. Each layer's tensors are used as the backward pass reaches it, and let go."""
    reports: list[SumReport] = []
    hooks, inputs = [], {}

    def keep(name: str, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        inputs[name] = args[0].detach().flatten(0, -2)

    def use(name: str, layer: nn.Linear, _: object, grads: tuple[Tensor, ...]) -> None:
        grad = grads[0].detach().flatten(0, -2)
        reports.extend(measure.layer(name, inputs.pop(name), layer.weight.detach(), grad))

    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            hooks.append(layer.register_forward_hook(partial(keep, name)))
            hooks.append(layer.register_full_backward_hook(partial(use, name)))
    try:
        # The embedding's output asks for a gradient, so that the first layer's hook is called too.
        x = model.run_blocks(model.embed(tokens))
        x = model.before_head(x).flatten(0, -2)
        weight = model.head_weight
        logits = F.linear(x, weight)
        logits.retain_grad()
        real = logits[:, : model.config.vocab_size].float()
        loss = F.cross_entropy(capped(real, model.config.softcap), targets.flatten())
        loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
    assert logits.grad is not None
    reports += measure.layer("head", x.detach(), weight.detach(), logits.grad)
    model.zero_grad(set_to_none=True)
    order = {name: number for number, (name, _) in enumerate(model.named_modules())}
    return sorted(reports, key=lambda report: order.get(report.layer, len(order)))


class _Measure:
    """Draws outputs of a layer's products and sums them again."""

    def __init__(self, operands: str, gradient_operands: str, samples: int) -> None:
        self.operands, self.gradient_operands, self.samples = operands, gradient_operands, samples
        self.generator = torch.Generator().manual_seed(0)

    def layer(self, name: str, x: Tensor, weight: Tensor, grad: Tensor) -> Iterator[SumReport]:
        """Reports of the three products: x (tokens, in), weight (out, in), grad (tokens, out)."""
        (x, x_scale), (weight, weight_scale) = (
            to_operand(t.float(), self.operands) for t in (x, weight)
        )
        grad, grad_scale = to_operand(grad.float(), self.gradient_operands)
        own, mixed = (
            product_bits(self.operands, self.operands),
            product_bits(self.operands, self.gradient_operands),
        )
        for role, a, b, bits, scales in (
            ("forward", x, weight.t(), own, (x_scale, weight_scale)),
            ("grad_input", grad, weight, mixed, (grad_scale, weight_scale)),
            ("grad_weight", grad.t(), x, mixed, (grad_scale, x_scale)),
        ):
            yield self.product(
                name, role, a, b, bits, tuple(1.0 if s is None else float(s) for s in scales)
            )

    def product(
        self, name: str, role: str, a: Tensor, b: Tensor, bits: int, scales: tuple[float, ...]
    ) -> SumReport:
        """The sums of some outputs of `a` (m, n) times `b` (n, columns)."""
        n = a.shape[1]
        rows = torch.randint(a.shape[0], (self.samples,), generator=self.generator).to(a.device)
        columns = torch.randint(b.shape[1], (self.samples,), generator=self.generator).to(a.device)
        terms = a.t().index_select(1, rows).mul_(b.index_select(1, columns))  # (n, samples)
        exact = terms.sum(dim=0, dtype=torch.float64)
        mean, square = exact / n, terms.square().sum(dim=0, dtype=torch.float64) / n
        spread = (square - mean.square()).clamp_min(0).sqrt()
        ratio = torch.where(spread > 0, mean / spread, 0.0)
        limit = FAR * float(square.mean().sqrt())
        chunks = [chunk for chunk in CHUNKS if chunk < n]
        # PyTorch lets go of the interpreter within each operation, and these are too small for threads of its own.
        with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as pool:
            found = dict(
                zip(
                    chunks,
                    pool.map(lambda chunk: _errors(terms, exact, chunk), chunks),
                    strict=True,
                )
            )
        return SumReport(
            layer=name,
            role=role,
            n=n,
            product_bits=bits,
            scales=(scales[0], scales[1]),
            mean=float(ratio.square().mean().sqrt()),
            outlier_share=int((terms.abs() > limit).sum()) / terms.numel(),
            nonzero_share=int(terms.count_nonzero()) / terms.numel(),
            # Sums no longer than a chunk are whole.
            errors={
                (b, chunk): found.get(chunk, found[0])[i]
                for i, b in enumerate(BITS)
                for chunk in CHUNKS
            },
        )


def _errors(terms: Tensor, exact: Tensor, chunk: int) -> list[tuple[float, float]]:
    """(relative error, signed error) of the sums of `terms` (n, samples), for each of `BITS`."""
    size = float(exact.norm())
    if size == 0:
        return [(0.0, 0.0)] * len(BITS)
    error = sums_in_order(terms, BITS, chunk).double() - exact
    signed = (error * exact.sign()).mean(dim=1) / exact.abs().mean()
    return list(zip((error.norm(dim=1) / size).tolist(), signed.tolist(), strict=True))


# --- what is shown ---------------------------------------------------------------------------------------------------


def lines(analysis: Analysis, error: float) -> Iterator[str]:
    """The analysis as a table with what it means, for an allowed relative error `error`."""
    yield (
        f"{analysis.run}, checkpoint of step {analysis.step}, a micro-batch of {analysis.tokens:,} tokens; {analysis.operands} operands, "
        f"{analysis.gradient_operands} gradients"
    )
    yield (
        f"{analysis.samples:,} outputs of each product, every addition rounded in order; bits needed for a relative error of {error:g}"
    )
    yield ""
    c = f"c{PAPERS_CHUNK}"
    head = (
        "layer",
        "role",
        "n",
        "m_p",
        "mean/sd",
        "beyond 6 sd",
        "VRR",
        f"VRR {c}",
        "bits",
        f"bits {c}",
        "cheapest",
    )
    yield from table_lines(head, [_cells(report, error) for report in analysis.reports])
    yield ""
    yield "n: products in a sum; m_p: mantissa bits of a product; VRR: mantissa bits by theory (v < 50), whole and in chunks of 64;"
    yield "bits: mantissa bits by measurement, whole and in chunks of 64; cheapest: fewest bits, then the longest chunks."
    yield f"* the products' mean is not zero, o more than {MANY:.1%} are outliers (of products of normal numbers: 0.07%): VRR assumes neither."
    yield ""
    yield from _summary(analysis, error)


def _cells(report: SumReport, error: float) -> tuple[str, ...]:
    cheapest = f"more than {BITS[-1]}"
    if (found := report.cheapest(error)) is not None:
        cheapest = f"{found[0]}, {f'c{found[1]}' if found[1] else 'whole'}"
    return (
        report.layer,
        report.role,
        f"{report.n}",
        f"{report.product_bits}",
        f"{report.mean:.3f}{'*' if report.has_mean else ' '}",
        f"{report.outlier_share:.2%}{'o' if report.outlier_share > MANY else ' '}",
        f"{report.theory()}",
        f"{report.theory(PAPERS_CHUNK)}",
        _bits_text(report.measured(error, 0)),
        _bits_text(report.measured(error, PAPERS_CHUNK)),
        cheapest,
    )


def _bits_text(bits: int | None) -> str:
    return f">{BITS[-1]}" if bits is None else f"<={bits}" if bits == BITS[0] else str(bits)


def _summary(analysis: Analysis, error: float) -> Iterator[str]:
    """The widest accumulator that any layer needs, by role, and how theory and measurement compare."""
    for role in ROLES:
        reports = [report for report in analysis.reports if report.role == role]
        if not reports:
            continue
        lengths = (0, PAPERS_CHUNK)
        whole, chunked = (
            max(report.measured(error, c) or BITS[-1] + 1 for report in reports) for c in lengths
        )
        theory, theory_chunked = (max(report.theory(c) for report in reports) for c in lengths)
        signed = min(report.errors[BITS[0], 0][1] for report in reports)
        yield (
            f"{role}: every layer is under the error with {_most(whole)} bits whole and {_most(chunked)} in chunks of {PAPERS_CHUNK} "
            f"(VRR: {theory} and {theory_chunked}); at {BITS[0]} bits, whole, sums come out {signed:+.1%} of their size at worst"
        )
    odd = [report for report in analysis.reports if report.has_mean or report.outlier_share > MANY]
    if odd:
        more = [
            report
            for report in odd
            if (report.measured(error, 0) or BITS[-1] + 1) > report.theory()
        ]
        yield (
            f"{len(odd)} of {len(analysis.reports)} products break VRR's assumptions; in {len(more)} of these the measurement asks for more "
            "bits than the theory"
        )


def _most(bits: int) -> str:
    return (
        f"more than {BITS[-1]}"
        if bits > BITS[-1]
        else str(bits)
        if bits > BITS[0]
        else f"{bits} or fewer"
    )


CSV_HEAD = (
    "layer", "role", "n", "product_bits", "scale_a", "scale_b", "mean_over_sd", "outlier_share", "nonzero_share", "bits", "chunk",
    "relative_error", "signed_error", "vrr_bits",
)  # fmt: skip


def as_csv(analysis: Analysis) -> str:
    """One line per layer, role, bits and chunk; `vrr_bits` are those that theory asks for with that chunk."""
    rows: list[list[object]] = []
    for report in analysis.reports:
        measures = [
            f"{value:.6g}" for value in (report.mean, report.outlier_share, report.nonzero_share)
        ]
        theory = {chunk: report.theory(chunk) for chunk in CHUNKS}
        for (bits, chunk), errors in report.errors.items():
            row = [
                report.layer,
                report.role,
                report.n,
                report.product_bits,
                *report.scales,
                *measures,
                bits,
                chunk,
            ]
            rows.append([*row, *(f"{error:.6g}" for error in errors), theory[chunk]])
    return csv_text(CSV_HEAD, rows)


def save(analysis: Analysis, folder: Path, error: float) -> list[Path]:
    """Write accumulation.csv and accumulation.png into `folder`; return their paths."""
    make_folder(folder)
    table, figure = folder / "accumulation.csv", folder / "accumulation.png"
    write_whole(table, as_csv(analysis))
    picture.write_figure(plots_of(analysis, error), figure, across=True)
    return [table, figure]


def plots_of(analysis: Analysis, error: float) -> list[Plot]:
    """Return error over chunk length, and error over bits, by role: the worst layer, with a band down to the best."""
    import pandas as pd

    chunks = [*(chunk for chunk in CHUNKS if chunk), 0]
    shown = 7
    by_chunk, by_bits = [], []
    for i, role in enumerate(ROLES):
        reports = [report for report in analysis.reports if report.role == role]
        errors = np.array([[r.errors[shown, chunk][0] for chunk in chunks] for r in reports])
        best, worst = errors.min(axis=0), errors.max(axis=0)
        by_chunk.append(picture.curve(i, role, range(len(chunks)), worst, best, worst))
        for line, chunk in enumerate((PAPERS_CHUNK, 0)):
            curve = [max(report.errors[bits, chunk][0] for report in reports) for bits in BITS]
            by_bits.append(picture.curve(i, role, BITS, curve, line=line))
    run = f"{analysis.run}, step {analysis.step}, {analysis.operands} operands"
    first = Plot(
        "accumulation",
        f"{run}: {shown} mantissa bits",
        pd.concat(by_chunk),
        "products per chunk",
        f"relative error of the sums (allowed: {error:g})",
        log="y",
        levels=(error,),
        ticks={place: str(chunk or "whole") for place, chunk in enumerate(chunks)},
    )
    second = replace(
        first,
        title=f"whole (paler: chunks of {PAPERS_CHUNK})",
        curves=pd.concat(by_bits),
        x="mantissa bits of the accumulator",
        ticks={bits: str(bits) for bits in BITS},
        fades=True,
    )
    return [first, second]
