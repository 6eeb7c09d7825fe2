"""SimiGrad: "SimiGrad: Fine-Grained Adaptive Batching for Large Scale Training using Gradient
Similarity Measurement", Qin, Rajbhandari, Ruwase, Yan, Yang and He, NeurIPS 2021.

The gradients of the two halves of a batch are compared by their cosine. A low cosine means that the
batch is mostly noise and should grow; a high one, that a smaller batch would do. So the batch is
moved by 10 % towards a target cosine.

    phi = <A, B> / (|A| |B|)               A, B: gradients of the two halves, before clipping
    B'  = 1.1 B  if phi < target,  0.9 B  if phi > target
    lr  = schedule * sqrt(B / B_0)         B_0 = train.batch_size

What phi measures: with A and B means over n sequences each, E<A,B> = |G|^2 and E|A|^2 = |G|^2 +
tr(Sigma) / n, so phi = B / (B + 2 B_s) with the gradient noise scale B_s = tr(Sigma) / |G|^2
(McCandlish et al. 2018, arXiv 1812.06162), and the rule comes to rest at B = 2 target / (1 -
target) * B_s. This relation is our derivation, not the paper's.

Defects of the released code (github.com/HeyangQin/SimiGrad, and for `interval` and `window` its
successor in HeyangQin/DeepSpeed) are mended: bounds are rounded to the quantum and never exceeded,
the batch can always shrink to its lower bound, smoothing averages the dot products (not the
cosines) of measurements at one batch size, and non-finite measurements are left out.

Attaches at three places. `plan_step` takes the batch size from Progress, an even number of
micro-batches and the scaled learning rate. `training/gradient.py` sums the gradient of the even
micro-batches apart from that of the odd ones, takes `half_dots` and adds the two. `after_step`
hands the dot products to `decide`, whose batch size the next step uses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from efftrain_cli.foundation.section import SECTION
from efftrain_cli.methods.method import Changes, Columns, Method, Problems, Sections, varying

if TYPE_CHECKING:
    from torch import Tensor

    from efftrain_cli.foundation.step import StepPlan, StepResult

CHUNK = 1 << 16
"""Elements per chunk of a dot product on the CPU."""
Dots = tuple[float, float, float]
"""(<A,B>, |A|^2, |B|^2) of the mean gradients of a batch's two halves."""
Window = tuple[Dots, ...]


@dataclass(frozen=True, kw_only=True, config=SECTION)
class SimiGrad(Method):
    """SimiGrad: adapt the batch size so that the gradients of the batch's two halves keep a given
    cosine similarity."""

    varies: ClassVar = frozenset({"batch", "steps"})
    gradients_held: ClassVar = 1  # that of the other half
    aliases: ClassVar = {"": "adaptive_batch"}

    target: float = Field(gt=-1, lt=1)
    """gamma, the cosine similarity to hold, in (-1, 1)."""
    min_batch_size: int = Field(ge=2)
    """Smallest batch, in sequences; at least 2, one for each half."""
    max_batch_size: int = Field(ge=2)
    """Largest batch, in sequences."""
    quantum: int = Field(default=1, ge=1)
    """Batch sizes are multiples of this, in sequences; an even one keeps the two halves equal."""
    interval: int = Field(default=1, ge=1)
    """Steps between two measurements of the similarity."""
    window: int = Field(default=1, ge=1)
    """Measurements averaged for one decision, which so comes every interval * window steps."""
    lr_scaling: Literal["sqrt", "linear", "none"] = "sqrt"
    """How the learning rate follows the batch size relative to train.batch_size."""
    lr_adjust_factor: float = Field(default=1.0, gt=0, le=1)
    """f in (0, 1] damps that: the learning rate is multiplied by 1 + f (s - 1), where s is the
    scaling's own factor."""

    @model_validator(mode="after")
    def _bounds_hold_a_batch(self) -> SimiGrad:
        if self.min_batch_size > self.max_batch_size:
            raise ValueError(
                f"min_batch_size {self.min_batch_size} is above max_batch_size"
                f" {self.max_batch_size}; swap them, or set both to one value for a fixed batch"
            )
        if self.lowest > self.highest:
            raise ValueError(
                f"no multiple of quantum {self.quantum} lies between"
                f" min_batch_size {self.min_batch_size} and max_batch_size {self.max_batch_size};"
                " choose a smaller quantum or wider bounds"
            )
        return self

    @property
    def lowest(self) -> int:
        """min_batch_size rounded up to the quantum, in sequences."""
        return -(-self.min_batch_size // self.quantum) * self.quantum

    @property
    def highest(self) -> int:
        """max_batch_size rounded down to the quantum, in sequences."""
        return self.max_batch_size // self.quantum * self.quantum

    def problems(self, recipe: Sections) -> Problems:
        key = "train.batch_size"
        batch_size = recipe.train.batch_size
        if batch_size % self.quantum:
            yield (
                key,
                f"must be a multiple of simigrad.quantum = {self.quantum}: SimiGrad starts from it",
            )
        elif not self.lowest <= batch_size <= self.highest:
            bounds = f"{self.lowest} to {self.highest} sequences"
            yield key, f"must lie within SimiGrad's bounds, {bounds}: SimiGrad starts from it"

    def warnings(self, recipe: Sections) -> Iterator[str]:
        if recipe.optim.has_end and recipe.optim.decay_steps is not None:
            yield (
                "optim.decay_steps decays by steps, and SimiGrad makes their number unknown;"
                " decay by tokens instead (decay_steps = false)"
            )
        largest = self.lr_factor(self.highest, recipe.train.batch_size)
        if largest > 4:
            yield (
                f"simigrad.lr_scaling = {self.lr_scaling!r}"
                f" can raise the learning rate to {largest:.1f} times the schedule's,"
                f" when the batch reaches max_batch_size = {self.max_batch_size};"
                " lower that bound, or check that the rate is stable"
            )
        for name in varying(recipe.methods, "length"):
            yield (
                f"simigrad with {name}: the similarity rises with the tokens in a sequence,"
                " so the batch will first grow and then shrink as sequences lengthen;"
                " run each alone before combining them"
            )

    def batch_bounds(self, batch_size: int) -> tuple[int, int]:
        return self.lowest, self.highest

    def cut_matters(self) -> bool:
        return True

    def assumptions(self, recipe: Sections) -> list[str]:
        return [
            "SimiGrad decides the batch size from gradients as they come; the plan assumes"
            f" that it stays as it is, at first train.batch_size = {recipe.train.batch_size}."
        ]

    def shortened(self, recipe: Sections, half: int, batch_size: int) -> Changes:
        interval = min(self.interval, half)
        shorter = replace(
            self,
            min_batch_size=max(2, batch_size // 2),
            max_batch_size=2 * batch_size,
            quantum=1,
            interval=interval,
            window=min(self.window, half // interval),
        )
        return {"simigrad": shorter}

    def measures_at(self, step: int) -> bool:
        """Return whether 1-based `step` measures the similarity."""
        return step % self.interval == 0

    def resting_batch_size(self, noise: float | None) -> float | None:
        """Return the batch, in sequences, at which phi would meet a positive target with noise
        scale `noise`."""
        if noise is None or self.target <= 0:
            return None
        return 2 * self.target / (1 - self.target) * noise

    def lr_factor(self, batch_size: int, initial: int) -> float:
        """Return the factor of the learning rate at `batch_size`, whose schedule was made for
        `initial` sequences."""
        if self.lr_scaling == "none":
            return 1.0
        factor = batch_size / initial
        if self.lr_scaling == "sqrt":
            factor = math.sqrt(factor)
        if self.lr_adjust_factor == 1:  # computed, the last bit could differ
            return factor
        return 1 + self.lr_adjust_factor * (factor - 1)

    def next_batch_size(self, batch_size: int, phi: float | None) -> int:
        """Return the batch after a decision on `phi`, in sequences.

        A multiple of the quantum within the bounds, different by a tenth or less, or by one quantum
        if that is more.
        """
        quantum = self.quantum
        wanted = batch_size
        if phi is not None and phi < self.target:
            tenth_more = 11 * batch_size // (10 * quantum) * quantum
            wanted = max(batch_size + quantum, tenth_more)
        elif phi is not None and phi > self.target:
            tenth_less = -(-9 * batch_size // (10 * quantum)) * quantum
            wanted = min(batch_size - quantum, tenth_less)
        return max(self.lowest, min(wanted, self.highest))

    def columns(self, recipe: Sections, plan: StepPlan, result: StepResult) -> Columns:
        """Return SimiGrad's columns, None in a step that did not measure, and if the value does not
        exist.

        `simigrad_batch_target` is the resting batch size by this step's noise scale alone, so it is
        as noisy as that; the batch that was run is `batch_size`, in sequences like both of them. A
        ratio of noisy numbers is biased: to average the noise scale over steps, average the three
        products first (`mean_dots`) and take the ratio of those.
        """
        batch_size = plan.batch_size
        dots = result.simigrad_dots
        measured: tuple[float | None, ...] = (None, None, None)
        phi = noise = None
        if dots is not None and all(map(math.isfinite, dots)):
            smaller_half = batch_size // 2
            measured = dots
            phi = similarity(dots)
            noise = noise_scale(dots, batch_size - smaller_half, smaller_half)
        return {
            "simigrad_similarity": phi,
            "simigrad_a_dot_b": measured[0],
            "simigrad_a_square": measured[1],
            "simigrad_b_square": measured[2],
            "simigrad_noise_scale": noise,
            "simigrad_batch_target": self.resting_batch_size(noise),
            "simigrad_lr_factor": self.lr_factor(batch_size, recipe.train.batch_size),
        }

    def decide(
        self,
        batch_size: int,
        window: Window,
        dots: Dots | None,
    ) -> tuple[int, Window]:
        """Return batch size and window after a step that ran `batch_size` sequences and measured
        `dots`.

        A measurement joins the window; a full window is decided on and cleared, so that no decision
        sees gradients of another batch size. (A sliding mean that is acted on every step drives the
        batch into a limit cycle.)
        """
        if dots is not None and similarity(dots) is not None:
            window = (*window, dots)[-self.window :]
        if len(window) < self.window:
            return batch_size, window
        return self.next_batch_size(batch_size, similarity(mean_dots(window))), ()


def similarity(dots: Dots) -> float | None:
    """Return phi = <A,B> / (|A| |B|), or None if a gradient is zero or not finite."""
    a_dot_b, a_square, b_square = dots
    if not all(map(math.isfinite, dots)) or a_square <= 0 or b_square <= 0:
        return None
    return a_dot_b / (math.sqrt(a_square) * math.sqrt(b_square))


def mean_dots(window: Sequence[Dots]) -> Dots:
    """Average the three products: their phi is less noisy than a mean of cosines, and nearly
    unbiased."""
    a_dot_b, a_square, b_square = (
        math.fsum(of_one) / len(window) for of_one in zip(*window, strict=True)
    )
    return a_dot_b, a_square, b_square


def noise_scale(dots: Dots, sequences_a: int, sequences_b: int) -> float | None:
    """Estimate B_s = tr(Sigma) / |G|^2, in sequences, from the mean gradients of halves of so many
    sequences.

    McCandlish et al. 2018, appendix A: <A,B> estimates |G|^2 and |A - B|^2 / (1/n_A + 1/n_B)
    estimates tr(Sigma), both without bias; equal halves give (B / 4) |A - B|^2 / <A,B>. None if
    <A,B> is not positive: too noisy to tell.
    """
    a_dot_b, a_square, b_square = dots
    if a_dot_b <= 0:
        return None
    square_of_difference = a_square + b_square - 2 * a_dot_b
    return square_of_difference / (1 / sequences_a + 1 / sequences_b) / a_dot_b


def half_dots(
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    sequences_a: int,
    sequences_b: int,
) -> Tensor:
    """Compute (<A,B>, |A|^2, |B|^2), fp64 (3,), from gradients a, b of the halves' summed losses
    over one constant.

    `a` and `b` list the same parameters; each is divided by its share of the sequences, so that
    halves of unequal size are compared as means. Products are summed in fp32 over chunks that fit a
    CPU's cache, and the chunks in fp64.
    """
    import torch

    products = []
    for tensor_a, tensor_b in zip(a, b, strict=True):
        length = tensor_a.numel()
        if tensor_a.device.type == "cpu":
            length = CHUNK
        chunks_a = tensor_a.flatten().split(length)
        chunks_b = tensor_b.flatten().split(length)
        for x, y in zip(chunks_a, chunks_b, strict=True):
            products += [torch.dot(x, y), torch.dot(x, x), torch.dot(y, y)]
    by_chunk = torch.stack(products).view(-1, 3)
    sums = by_chunk.sum(dim=0, dtype=torch.float64)

    share_a = sequences_a / (sequences_a + sequences_b)
    share_b = 1 - share_a
    shares = [share_a * share_b, share_a * share_a, share_b * share_b]
    return sums / sums.new_tensor(shares)
