"""Standardization loss: normalization as a term of what is minimized, in place of layers that
normalize.

Collins, Balle, Shlens: "Accelerating Training of Deep Neural Networks with a Standardization Loss",
2019, arXiv 1903.00925. Beside the cross-entropy the network minimizes, over its activations before
the nonlinearity, the divergence of each channel from N(0, 1):

    L = cross-entropy + lambda sum_sites sum_channels (mu^2 + sigma^2 - log sigma^2 - 1) / 2

mu and sigma^2 are a channel's mean and biased variance over the positions of a micro-batch. Nothing
is normalized in the forward pass, so nothing of it remains when the model is used, and no position
sees another's statistics.

The paper's networks are convolutional and its lambda multiplies a sum; here `weight` multiplies the
mean over sites and channels, so that it keeps its meaning over widths and depths: weight_sum is the
paper's lambda. What is ours: which activations of a transformer take the place of "before the
nonlinearity" (`sites`), and eps.

Attaches to the objective: blocks show the activations that are asked for, and return their
divergences beside their output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from efftrain_cli.foundation.section import SECTION
from efftrain_cli.methods.method import Method, Problems, Sections
from efftrain_cli.model.flops import channels

if TYPE_CHECKING:
    from torch import Tensor

    from efftrain_cli.foundation.step import StepPlan
    from efftrain_cli.foundation.tensors import Tensors
    from efftrain_cli.model.config import Dimensions
    from efftrain_cli.model.gpt import GPT, Gates

SITES: dict[str, tuple[str, ...]] = {
    "preact": ("attn.c_attn", "mlp.c_fc"),
    "ln_input": ("ln_1", "ln_2", "ln_f"),
    "all_linear": ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
}
"""The activations that each choice of sites asks for, in the order in which a model computes
them."""


@dataclass(frozen=True, kw_only=True, config=SECTION)
class StandardizationLoss(Method):
    """Standardization loss: draw activations towards mean 0 and variance 1 by a term of the loss,
    not by layers."""

    prefix: ClassVar = "std"
    aliases: ClassVar = {
        "": "standardisation_loss std_loss sloss",
        "weight": "lambda coefficient",
    }

    weight: float = Field(ge=0)
    """Factor of the divergence, a mean over sites and channels in nats; 0 measures it and changes
    nothing."""
    sites: Literal["preact", "ln_input", "all_linear"] = "preact"
    """Activations: the outputs of c_attn and c_fc, before attention and GELU; what ln_1, ln_2 and
    ln_f take in or would; or the outputs of all linear layers of the blocks."""
    eps: float = Field(default=1e-6, gt=0)
    """Added to the variance inside the logarithm; the paper has none."""

    def names(self) -> tuple[str, ...]:
        """Name the activations that are asked for, of a block and of the end."""
        return SITES[self.sites]

    def sites_of(self, n_layer: int) -> list[str]:
        """Name every site of a model, in order: "h.0.attn.c_attn"."""
        sites = []
        for number in range(n_layer):
            sites += [f"h.{number}.{name}" for name in self.names() if name != "ln_f"]
        if "ln_f" in self.names():
            sites.append("ln_f")
        return sites

    def site_weights(self, config: Dimensions) -> list[float]:
        """Weigh each site in the mean over sites and channels: the sum is 1."""
        sizes = self._channels_of_sites(config)
        return [size / sum(sizes) for size in sizes]

    def weight_sum(self, config: Dimensions) -> float:
        """Return the paper's lambda: the factor of the sum over all sites and channels."""
        return self.weight / sum(self._channels_of_sites(config))

    def _channels_of_sites(self, config: Dimensions) -> list[int]:
        by_name = channels(config)
        widths = []
        for site in self.sites_of(config.n_layer):
            name = site.split(".", 2)[-1]  # "h.0.mlp.c_fc" -> "mlp.c_fc", "ln_f" as it is
            widths.append(by_name[name])
        return widths

    # --- what the recipe says of it ---

    def cut_matters(self) -> bool:
        return True

    def problems(self, recipe: Sections) -> Problems:
        model = recipe.model
        if self.sites == "all_linear" and model.mlp_facts.is_gated:
            rule = f'must be "preact" or "ln_input" with mlp = "{model.mlp}": c_up is no site'
            yield "standardization_loss.sites", rule

    def warnings(self, recipe: Sections) -> Iterator[str]:
        model = recipe.model
        if model.norm_facts.vectors and self.sites == "ln_input":
            yield (
                f'standardization_loss.sites = "ln_input" with model.norm = "{model.norm}":'
                " the forward pass ignores the scale that is asked for, as each norm"
                " divides it out; the term only changes what the residual stream looks like"
            )
        if self.weight > 10:
            yield (
                f"standardization_loss.weight = {self.weight:g} multiplies a mean"
                " of nats per channel, not the paper's sum over channels:"
                " beside a cross-entropy of a few nats 0.01 to 1 is usual"
            )

    def assumptions(self, recipe: Sections) -> list[str]:
        model = recipe.model
        sites = len(self.sites_of(model.n_layer))
        return [
            f"The standardization loss at {sites} sites is averaged with weight {self.weight:g};"
            f" the paper's lambda, a factor of the sum, is {self.weight_sum(model):.3g}. Moments"
            " are of each micro-batch of train.micro_batch_tokens, a setting of this method."
        ]

    # --- what it computes ---

    def attach(self, model: GPT) -> None:
        """Have the blocks of `model` return the divergence of each of their sites."""
        names = self.names()

        def of_site(name: str, activation: Tensor) -> Tensor | None:
            if name not in names:
                return None
            return self.site_loss(activation)

        for block in model.h:
            block.term = of_site  # type: ignore[assignment]

    def site_loss(self, activation: Tensor) -> Tensor:
        """Compute the mean divergence of one site's activation (B, T, channels), 0-d fp32, nats per
        channel."""
        from efftrain_cli.model.losses import standardization_loss

        if self.weight == 0:
            activation = activation.detach()
        return standardization_loss(activation, self.eps)

    def of_sites(self, terms: Sequence[Tensor], gates: Gates, x: Tensor, n_layer: int) -> Tensor:
        """Return the divergence of every site, (sites,), in the order of `sites_of`: 0 in blocks
        that did not run.

        Args:
            terms: of each block that ran, its sites' (sites of a block,).
            gates: which blocks ran; None: all.
            x: the residual stream after the last block, (B, T, C).
        """
        import torch

        of_blocks = iter(terms)
        parts = []
        for number in range(n_layer):
            if gates is None or gates[number]:
                parts.append(next(of_blocks))
            else:
                parts.append(x.new_zeros(self._sites_per_block, dtype=torch.float32))
        if "ln_f" in self.names():
            parts.append(self.site_loss(x)[None])
        return torch.cat(parts)

    def loss_columns(
        self,
        divergences: Tensor,
        shares: Tensor,
        plan: StepPlan,
        gates: Sequence[Gates],
        n_layer: int,
    ) -> Tensors:
        """Return a step's columns, each 0-d: the mean, and in steps that are evaluated the
        divergence of each site.

        That of a site is over the micro-batches in which its block ran; a block that never ran has
        no column.
        """
        columns = {"standardization_loss": (divergences * shares).sum()}
        if not plan.evaluate:
            return columns
        sites = zip(self.sites_of(n_layer), divergences, strict=True)
        for number, (site, value) in enumerate(sites):
            block = number // self._sites_per_block
            sequences = 0
            for part, gate in enumerate(gates):
                if gate is None or block >= n_layer or gate[block]:
                    sequences += plan.sequences_of(part)
            if sequences:
                columns[f"std_kl_{site}"] = value * (plan.batch_size / sequences)
        return columns

    @property
    def _sites_per_block(self) -> int:
        return len(self.names()) - ("ln_f" in self.names())
