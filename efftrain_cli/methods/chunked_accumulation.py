"""Chunk-based accumulation: how few bits training can add with.

Wang, Choi, Brand, Chen, Gopalakrishnan: "Training Deep Neural Networks with 8-bit Floating Point
Numbers", NeurIPS 2018, arXiv 1812.08011. The bits that a sum needs by theory: Sakr et al., ICLR
2019 (`variance_retention.py`).

A matrix product is a sum of many small products, and an accumulator of few mantissa bits swallows
what is added to a sum that has already grown. Cut into chunks, no partial sum grows far, and the
sum over the chunks is short: so 8-bit operands can be added in 16 bits and less. This section lays
the model's matrix products out in such accumulators, each of the three products of a linear layer
in its own:

    y   = x W^T     forward       sums over the inputs of a layer (n_embd or 4 n_embd)
    g_x = g W       grad_input    sums over its outputs (n_embd to 4 n_embd)
    g_W = g^T x     grad_weight   sums over the tokens of a micro-batch: by far the longest

No GPU has an accumulator whose width can be chosen, so it is emulated in fp32: what training
becomes is measured, speed is not. fidelity = "blocked" rounds to nearest after every 32 products;
"hardware" uses the fp8 matrix units of a GPU as they are, with the one switch they have.

Attaches where the model is built: the blocks' linear layers are replaced; the papers keep the head
wide. Only the GEMMs are narrow: the papers' 16-bit weight update is left out, weights and moments
stay fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.foundation.section import SECTION
from efftrain_cli.methods.method import Method, Problems, Sections
from efftrain_cli.model.arithmetic import Accumulator, Arithmetic

if TYPE_CHECKING:
    import torch

    from efftrain_cli.model.gpt import GPT

UNIT = 16
"""fp8 matrix units take dimensions that are multiples of this."""


@dataclass(frozen=True, kw_only=True, config=SECTION)
class ChunkedAccumulation(Arithmetic, Method):
    """Chunk-based accumulation: matrix products with narrow operands, added in narrow accumulators,
    in chunks."""

    aliases: ClassVar = {"": "accumulation chunk_accumulation fp8 low_precision"}

    layers: Literal["all", "inner"] = "all"
    """Blocks whose linear layers take part: all of them, or all but the first and the last, which
    stay fp32."""

    @property
    def roles(self) -> dict[str, Accumulator | None]:
        """The accumulator of each product, by the name of its key."""
        return {
            "forward": self.forward,
            "grad_input": self.grad_input,
            "grad_weight": self.grad_weight,
        }

    @model_validator(mode="after")
    def _check(self) -> ChunkedAccumulation:
        breaches = []
        present = {name: role for name, role in self.roles.items() if role is not None}
        if self.fidelity == "hardware":
            wide = Accumulator(), Accumulator(fast_accumulation=True)
            if chosen := [name for name, role in present.items() if role not in wide]:
                breaches.append(
                    'fidelity = "hardware" cannot choose bits, chunk'
                    f" and exponent_bits, given in {', '.join(chosen)}: a GPU adds as it is built;"
                    " leave them out and say fast_accumulation = true or false"
                )
            if self.operands != "fp8_e4m3":
                breaches.append(
                    f'fidelity = "hardware" needs operands = "fp8_e4m3", not "{self.operands}":'
                    " fp8 matrix units take it for activations and weights,"
                    " and none multiplies e5m2 by e5m2"
                )
            if not self.gradient_format.startswith("fp8"):
                breaches.append(
                    'fidelity = "hardware" needs gradient_operands "fp8_e5m2"'
                    f' or "fp8_e4m3", not "{self.gradient_format}"'
                )
        elif fast := [name for name, role in present.items() if role.fast_accumulation]:
            breaches.append(
                f'fidelity = "{self.fidelity}" knows no fast_accumulation, given'
                f' in {", ".join(fast)}: it is a switch of GPUs and needs fidelity = "hardware";'
                " emulation takes bits and chunk"
            )
        if breaches:
            raise ValueError("; ".join(breaches))
        return self

    def problems(self, recipe: Sections) -> Problems:
        model = recipe.model
        blocks = model.n_layer
        if self.layers == "inner" and blocks < 3:
            rule = (
                f"leaves none of {blocks} blocks: the first and the last stay fp32;"
                ' take "all", or a deeper model'
            )
            yield "chunked_accumulation.layers", rule
        if self.fidelity != "hardware":
            return
        sides = {
            "n_embd": model.n_embd,
            "d_ff": model.ff_size,
            "n_head": model.attention_size,
            "n_kv_head": sum(model.qkv_rows),
        }
        for key, side in sides.items():
            if side % UNIT:
                rule = (
                    f"makes a matrix of {side} rows or columns,"
                    f" and fp8 matrix units take multiples of {UNIT} (chunked_accumulation)"
                )
                yield f"model.{key}", rule

    def warnings(self, recipe: Sections) -> Iterator[str]:
        for name, longest in self.longest_sums(recipe).items():
            role = self.roles[name]
            if role is not None and role.chunk >= longest:
                yield (
                    f"chunked_accumulation.{name}.chunk = {role.chunk} is no shorter than any sum"
                    f" of the blocks, the longest being {longest:_}: nothing is cut into chunks"
                )
        if self.fidelity != "hardware" and recipe.train.dtype == "bf16":
            yield (
                'train.dtype = "bf16" acts outside the layers of chunked_accumulation only:'
                f" those take their operands in {self.operands}, add as they say,"
                " and round only their result to bf16"
            )

    def assumptions(self, recipe: Sections) -> list[str]:
        if self.fidelity == "hardware":
            return [
                "Linear layers multiply in fp8 where the device can;"
                " on a CPU fast_accumulation has no effect."
            ]
        return [
            f'Narrow accumulators are emulated (fidelity "{self.fidelity}"), so steps take longer'
            " than fp32's; the papers' savings are those of special hardware."
        ]

    def longest_sums(self, recipe: Sections) -> dict[str, int]:
        """Return the products in the longest sum of each role, in the blocks' layers at full
        micro-batches."""
        model = recipe.model
        train = recipe.train
        sequences = min(train.batch_size, max(1, train.micro_batch_tokens // model.seq_len))
        return {
            "forward": max(model.n_embd, model.attention_size, model.ff_size),
            "grad_input": max(model.n_embd, sum(model.qkv_rows), model.ff_size),
            "grad_weight": sequences * model.seq_len,
        }

    def attach(self, model: GPT, device: torch.device) -> None:
        """Replace the linear layers of `model` that take part; parameters and their names stay.

        Raises:
            UsageError: fidelity is "hardware" and the device is a GPU without fp8 matrix units.
        """
        import torch
        from torch import nn

        from efftrain_cli.model.linear import NarrowLinear

        if self.fidelity == "hardware" and device.type == "cuda":
            check_fp8(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
        wide: tuple[str, ...] = ()
        if self.layers == "inner":
            wide = ("0.", f"{len(model.h) - 1}.")
        for name, layer in list(model.h.named_modules()):
            if isinstance(layer, nn.Linear) and not name.startswith(wide):
                path, _, child = name.rpartition(".")
                setattr(model.h.get_submodule(path), child, NarrowLinear(layer, self))


def check_fp8(name: str, capability: tuple[int, int]) -> None:
    """Accept a GPU that has fp8 matrix units: compute capability 8.9 (Ada) or later.

    Raises:
        UsageError: it has none.
    """
    if capability < (8, 9):
        raise UsageError(
            f'chunked_accumulation.fidelity = "hardware": {name} has no fp8 matrix units'
            f" (compute capability {capability[0]}.{capability[1]}; they came with 8.9).\n"
            "Use a Hopper or Ada GPU, or emulate: --set chunked_accumulation.fidelity=blocked"
        )
