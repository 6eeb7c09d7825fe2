"""Progressive layer dropping: "Accelerating Training of Transformer-Based Language Models with
Progressive Layer Dropping", Zhang and He, NeurIPS 2020, arXiv 2010.13369.

In a pre-LN transformer the blocks refine one residual stream, so a block can be skipped at random
and the rest still make sense. Deep blocks are skipped more often than shallow ones, and dropping
sets in only after the first updates. A skipped block is not computed, so a step costs fewer FLOPs;
at evaluation all blocks run.

    theta(t) = (1 - theta) exp(-gamma t) + theta,   gamma = 100 / T    t: updates before the step
    p_l      = 1 - (l / L) (1 - theta(t)),          l = 1 .. L         keep probability of block l
    G_l      ~ Bernoulli(p_l)                                          one gate for both sub-layers
    h        = x + G_l attn(LN(x)) / p_l
    y        = h + G_l ffn(LN(h)) / p_l

Dividing by p_l keeps the expected output of a branch, given its input, equal to the dense one, so
nothing is rescaled at evaluation. The expectation of y is exact for attention only: ffn reads
LN(h), which the same gate has changed, and blocks are not linear, so further up the dense model is
an approximation of the mean. The equations are those that later papers and re-implementations give;
the released BERT example (DeepSpeedExamples, bing_bert) samples with the p of the block before and
divides by the p of the block itself, which inflates every branch: `keep = "code"` does that, for
comparison only.

Attaches at two places. `plan_step` puts `keep_probabilities` into the plan. The forward pass asks
`gates` which blocks to call, on the host, from a counter-based generator: equal on every rank, the
same after a resume, and no device is waited for. A block that no micro-batch of a step called has a
gradient of zero, as in DeepSpeed: AdamW still decays its weights and follows its momentum, and
every parameter's Adam step count stays the run's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from efftrain_cli.foundation.section import SECTION
from efftrain_cli.methods.method import Changes, Columns, Method, Sections

if TYPE_CHECKING:
    from efftrain_cli.foundation.step import StepPlan, StepResult

GAMMA_STEPS = 100
"""gamma = GAMMA_STEPS / T: after T / 100 updates theta has come 63 % of its way."""


@dataclass(frozen=True, kw_only=True, config=SECTION)
class ProgressiveLayerDrop(Method):
    """Progressive layer dropping: skip whole blocks at random, more of them later in training, deep
    ones more often."""

    varies: ClassVar = frozenset({"blocks"})
    prefix: ClassVar = "pld"
    aliases: ClassVar = {"": "pld layer_drop layerdrop stochastic_depth progressive_layer_dropping"}

    theta: float = Field(default=0.5, gt=0, le=1)
    """Keep probability of the last block that the schedule approaches, in (0, 1]; the paper uses
    0.5 to 0.9, 1 drops nothing."""
    steps: int = Field(ge=0)
    """T, optimizer steps of the whole run, which set the pace gamma = 100 / T; 0: no ramp, theta is
    constant."""
    keep: Literal["equation", "code"] = "equation"
    """Keep probabilities and scale: the paper's equation, or the released code's mismatched
    pair."""
    granularity: Literal["step", "micro_step"] = "micro_step"
    """How often the gates are drawn: once per optimizer step, or for every micro-batch."""

    def cut_matters(self) -> bool:
        return self.theta < 1 and self.granularity == "micro_step"

    def warnings(self, recipe: Sections) -> Iterator[str]:
        run_steps = recipe.full_steps
        if run_steps is None or self.theta == 1:
            return
        if self.steps > 2 * run_steps:
            yield (
                f"progressive_layer_drop.steps = {self.steps} sets the pace"
                f" for a run of that many steps, and this run has {run_steps}:"
                f" theta only comes down to {self.theta_at(run_steps):.2f},"
                " and fewer blocks are skipped than meant; set it to the steps of the run"
            )

    def assumptions(self, recipe: Sections) -> list[str]:
        return ["Layer dropping draws blocks at random; FLOPs are planned at their expectation."]

    def shortened(self, recipe: Sections, half: int, batch_size: int) -> Changes:
        if self.steps <= 2 * half:
            return {}
        return {"progressive_layer_drop": replace(self, steps=2 * half)}

    def columns(self, recipe: Sections, plan: StepPlan, result: StepResult) -> Columns:
        return {
            "pld_theta": self.theta_at(plan.step),
            "pld_blocks": result.blocks_executed,
        }

    def theta_at(self, step: int) -> float:
        """Return theta(t) of 1-based `step`, t = step - 1: step 1 drops nothing, unless theta is
        constant."""
        if self.steps == 0:
            return self.theta
        gamma = GAMMA_STEPS / self.steps
        decay = math.exp(-gamma * (step - 1))
        return (1 - self.theta) * decay + self.theta

    def keep_probabilities(self, step: int, n_layer: int) -> tuple[float, ...]:
        """Return p_l with which each of `n_layer` blocks is kept in 1-based `step`, in order."""
        drop = 1 - self.theta_at(step)
        depths = self._depths(n_layer)
        return tuple(1 - depth * drop for depth in depths)

    def branch_scales(self, step: int, n_layer: int) -> tuple[float, ...]:
        """Return the factor of each block's branches in 1-based `step`: 1 / p_l of the equation,
        for both `keep`."""
        drop = 1 - self.theta_at(step)
        blocks = range(1, n_layer + 1)
        return tuple(1 / (1 - block / n_layer * drop) for block in blocks)

    def blocks_over(self, first: int, last: int, n_layer: int) -> float:
        """Return the expected number of blocks that 1-based steps `first` to `last` run in all."""
        drops = 0.0
        for step in range(first, last + 1):
            drops += 1 - self.theta_at(step)
        steps = last + 1 - first
        skipped = sum(self._depths(n_layer)) * drops
        return steps * n_layer - skipped

    def _depths(self, n_layer: int) -> list[float]:
        """Return l / L of each block; the released code samples with the l of the block before."""
        first = 1
        if self.keep == "code":
            first = 0
        blocks = range(first, first + n_layer)
        return [block / n_layer for block in blocks]

    def gates(
        self,
        keep: Sequence[float],
        *,
        seed: int,
        step: int,
        micro_step: int,
        paired: bool = False,
    ) -> tuple[bool, ...]:
        """Draw G_l ~ Bernoulli(keep_l), which blocks run in a micro-batch of 1-based `step`, as a
        function of the arguments alone.

        Args:
            keep: the plan's.
            micro_step: number of the micro-batch in the whole step, from 0.
            paired: micro-batches 2j and 2j + 1 share their gates, for a method that compares the
                gradients of a batch's two halves: with gates of their own the halves would differ
                by which blocks ran, and it would enlarge the batch to average that away.
        """
        import numpy as np

        draw = micro_step
        if self.granularity == "step":
            draw = 0
        elif paired:
            draw = micro_step // 2
        # A generator without state has nothing to save or to synchronise between ranks, and no
        # other random draw disturbs it.
        counter = [0, 0, draw, step - 1]
        philox = np.random.Philox(key=seed, counter=counter)
        uniform = np.random.Generator(philox).random(len(keep))
        is_kept = uniform < keep
        return tuple(is_kept.tolist())
