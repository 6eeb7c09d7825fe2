"""Ouroboros: "Ouroboros: On Accelerating Training of Transformer-Based Language Models", Yang, Huo,
Wang, Huang and Carin, NeurIPS 2019, arXiv 1909.06695; its relatives are decoupled parallel
backpropagation (DDG, Huo et al., ICML 2018) and features replay (Huo et al., NeurIPS 2018).

The network is cut into K modules on K - 1 devices: the first and the last share one, because the
input embedding and the output projection are one matrix. The forward pass of a batch goes through
all modules at today's weights. The backward passes do not wait for each other: in step t, module k
(1 .. K) does that of batch t - (K - k), with what module k + 1 sent it at the end of step t - 1.

    tau_k = K - k                                              staleness of module k in steps
    w_k <- w_k - lr g_k(w^(t - tau_k); x_(t - tau_k))          at the weights of that step
    g_V = dF/dV_out(w^t; x_t)                                  the tied matrix: fresh,
          + dF/dV_in(w^(t - K + 1); x_(t - K + 1))             and K - 1 steps ago

`sum` is the authors' code; `mean` halves g_V, which may be the paper's text. A module has no
gradient in its first tau_k steps and is not updated; the gradients in flight at the end of a run
are dropped.

Attaches at the gradient: `training/delay.py` delays it on one device, `training/ring.py`
divides the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from efftrain_cli.foundation.section import SECTION
from efftrain_cli.methods.method import Changes, Method, Problems, Sections, varying
from efftrain_cli.model.flops import block_parameters, flops_per_token

if TYPE_CHECKING:
    from efftrain_cli.model.config import GPTConfig


@dataclass(frozen=True, kw_only=True, config=SECTION)
class Ouroboros(Method):
    """Ouroboros: train the model's modules on gradients that are up to K - 1 steps old, as a ring
    of devices would."""

    supports_sharding: ClassVar = False

    modules: int = Field(ge=1)
    """K, the modules that the model is cut into, on K - 1 devices; 1 delays nothing."""
    embedding_gradient: Literal["sum", "mean"] = "sum"
    """How the gradients of the tied matrix's two uses are joined: as in the authors' code, or half
    of that."""
    split: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """Blocks of each module, in order; default: equal FLOPs on every device, with the head
    counted."""
    warmup_steps: int = Field(default=0, ge=0)
    """First steps, of ordinary training: no delay, one norm for clipping, and the tied matrix's
    gradients summed."""
    clip: Literal["global", "module"] = "global"
    """What optim.grad_clip bounds: the norm over all modules, or that of each device's, as in the
    authors' code."""

    @model_validator(mode="after")
    def _split_has_modules(self) -> Ouroboros:
        split = self.split
        if split is None:
            return self
        if len(split) != self.modules:
            raise ValueError(
                f"split {list(split)} names {len(split)} modules, and modules = {self.modules}"
            )
        if any(blocks == 0 for blocks in split[1:-1]):
            raise ValueError(
                f"split {list(split)}: only the first and the last module can do without a block,"
                " as they have embedding and head"
            )
        return self

    @property
    def devices(self) -> int:
        """Of a ring: K - 1, the first holding the first and the last module."""
        return max(1, self.modules - 1)

    def staleness(self, module: int) -> int:
        """Return tau_k in steps, for module k from 1."""
        return self.modules - module

    def device_of(self, module: int) -> int:
        """Return the device in the ring, from 0, that holds module k."""
        if module == self.modules:
            return 0
        return module - 1

    def problems(self, recipe: Sections) -> Problems:
        n_layer = recipe.model.n_layer
        if self.modules > n_layer + 2:
            yield (
                "ouroboros.modules",
                f"must be at most model.n_layer + 2 = {n_layer + 2}:"
                " embedding and head can stand alone, the modules between need a block",
            )
        if self.split is not None and sum(self.split) != n_layer:
            yield (
                "ouroboros.split",
                f"must add up to model.n_layer = {n_layer} blocks, not {sum(self.split)}",
            )
        if self.modules == 1:
            return
        reasons = {
            "steps": (
                "the update mixes gradients of several steps,"
                " so no batch's two halves tell its noise"
            ),
            "blocks": "not implemented: the passes of its modules run every block",
        }
        for what, why in reasons.items():
            for name in varying(recipe.methods, what):
                yield name, f"cannot be combined with ouroboros: {why}"
        if recipe.stages:
            yield (
                "stages",
                "cannot be combined with ouroboros:"
                " gradients in flight have the shape of the smaller model",
            )

    def warnings(self, recipe: Sections) -> Iterator[str]:
        warmup = self.warmup_steps
        steps = recipe.full_steps
        if self.modules > 1 and steps is not None and warmup >= steps:
            yield (
                f"ouroboros.warmup_steps = {warmup} is the whole run of {steps} steps:"
                " no gradient is ever delayed"
            )

    def assumptions(self, recipe: Sections) -> list[str]:
        if self.modules == 1:
            return []
        after = ""
        if self.warmup_steps:
            after = f", after {self.warmup_steps} steps of ordinary training"
        return [
            f"Ouroboros: {self.modules} modules on gradients of {self.modules - 1} to 0 steps ago,"
            f" the last fresh{after}. A module waits unchanged for its first one;"
            " the last ones in flight are dropped."
        ]

    def shortened(self, recipe: Sections, half: int, batch_size: int) -> Changes:
        warmup = min(self.warmup_steps, half // 2)
        return {"ouroboros": replace(self, warmup_steps=warmup)}

    def without_schedule(self) -> Changes:
        return {"ouroboros": replace(self, warmup_steps=0)}

    def blocks(self, shape: GPTConfig) -> tuple[int, ...]:
        """Return the blocks of each module, first module first: `split`, or the most even one."""
        return self.split or balanced_split(self.modules, shape)

    def in_flight_bytes(self, shape: GPTConfig) -> int:
        """See `Method`: tau_k fp32 gradients of each module."""
        rows = shape.padded_vocab_size
        if shape.position_facts.has_table:
            rows += shape.seq_len
        numbers = self.staleness(1) * rows * shape.n_embd
        for module, blocks in enumerate(self.blocks(shape), 1):
            numbers += self.staleness(module) * blocks * block_parameters(shape)
        return 4 * numbers

    def delays_at(self, step: int) -> bool:
        """Return whether 1-based `step` uses delayed gradients."""
        return self.modules > 1 and step > self.warmup_steps


def head_in_blocks(shape: GPTConfig) -> float:
    """Return the FLOPs of the head in those of a block, at full length: 4.5 of GPT-2 117M."""
    outside = flops_per_token(shape, shape.seq_len, blocks=0)
    with_block = flops_per_token(shape, shape.seq_len, blocks=1)
    head = outside.with_logits - outside.without_logits
    block = with_block.without_logits - outside.without_logits
    return head / block


def balanced_split(modules: int, shape: GPTConfig) -> tuple[int, ...]:
    """Split blocks over K modules so that the busiest of the K - 1 devices has least to do.

    The head counts with the last module. The first device's blocks are halved between the first and
    the last module, the last taking an odd one, as in the authors' code; so is the model if K = 2.
    The modules between take equal shares, the earlier ones one block more if there is a remainder.
    """
    n_layer = shape.n_layer
    if modules == 1:
        return (n_layer,)
    if modules == 2:
        return (n_layer // 2, n_layer - n_layer // 2)
    between = modules - 2
    head = head_in_blocks(shape)

    def shares(first_device: int) -> tuple[int, ...]:
        """Return the blocks of each module between, if the first device has `first_device`."""
        each, more = divmod(n_layer - first_device, between)
        return tuple(each + (number < more) for number in range(between))

    def imbalance(first_device: int) -> tuple[float, float]:
        loads = (first_device + head, *shares(first_device))
        return max(loads), sum(load * load for load in loads)

    best = min(range(n_layer - between + 1), key=imbalance)
    return (best // 2, *shares(best), best - best // 2)
