"""Staged training by growth operators (Shen, Walsh, Keutzer, Dodge, Peters, Beltagy, ICML 2022,
arXiv 2203.06211).

Train a small model, map its whole training state (weights, Adam moments, schedule) to a larger one,
train on. Growth should keep the loss, and the loss should go on falling as fast as that of a model
that had the larger size from the start. The schedule jumps to the step at which such a model would
have reached this loss.

Width, factor k: every hidden vector x becomes [x; ...; x].
    vectors, embeddings      p' = [p; ...; p]
    matrices                 W' = blockdiag(W, ..., W) + A, each row of A's blocks summing to 0
    the last layer norm      g' = [g; ...; g] / k, because the output matrix is the embedding matrix
A layer norm of a duplicated vector is the duplicated layer norm, heads double and keep their size,
and every row of blocks of W' maps [u; ...; u] to W u: the logits stay, up to rounding. A = 0 is the
paper's operator. With A = 0 the copies get equal gradients at every step, so the wide model never
becomes more than the narrow one. The paper's runs had dropout, which made the copies differ; we
have none, so the default draws A at random. With A = 0 the gradient after growth is g/k in every
block, the zero blocks included, and g in the last layer norm: the running averages become m/k and
v/k^2 in *every* block (`moments = "ema"`). With A drawn at random this is an approximation: the
copies' gradients then differ. The released operator (`moments = "paper"`) leaves the zero blocks'
averages at 0.

Depth, factor k: layers are inserted that compute the identity (`identity`: layer norms and biases
0, matrices eye; `zero_out_proj`: a copy of the layer before, whose two projections into the
residual stream are 0), or layers are copied (`copy_interleave` or `copy_append`), which
keeps no loss.

`pad`, `d_ff` and `n_kv_head` set a size instead: any width (RMS norms only), any number of hidden
units, whole groups of heads. New entries are 0 where they would change the function, and random
where they would not.

It attaches between two stages: `growth_operators.grow` takes (config, tensors by name) and gives
larger ones. `stages.py` has the stages of a recipe and their switching rules, and
`efftrain_cli/grow/planner.py` plans when to switch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic.dataclasses import dataclass

from efftrain_cli.foundation.section import SECTION
from efftrain_cli.methods.method import Changes, Method, Problems, Sections
from efftrain_cli.methods.stages import (
    Operator,
    OperatorKind,
    Stage,
    Switch,
    parse_operator,
    stage_problems,
)

Moments = Literal["paper", "ema", "reset"]
Symmetry = Literal["none", "offdiag"]
Depth = Literal["identity", "zero_out_proj", "copy_interleave", "copy_append"]


def _kinds(stages: Sequence[Stage]) -> set[OperatorKind]:
    """Return the kinds of operators that the stages have."""
    kinds: set[OperatorKind] = set()
    for stage in stages:
        kinds |= {parse_operator(text).kind for text in stage.operators}
    return kinds


@dataclass(frozen=True, kw_only=True, config=SECTION)
class StagedGrowth(Method):
    """Staged training: how a small model's whole training state is mapped to a larger model's."""

    aliases: ClassVar = {"": "growth"}

    moments: Moments = "ema"
    """The optimizer's moments: those of the released operator, which leaves the zero blocks' at 0
    ("paper"); what the running averages would be, in every block ("ema"); or all 0, as a control
    ("reset")."""
    symmetry: Symmetry = "offdiag"
    """What makes a wider model's copies differ: nothing, or blocks that cancel; the loss stays."""
    depth: Depth = "zero_out_proj"
    """What a deeper model's new layers compute: the identity in two ways (the loss stays), or a
    copy of each layer after it or of all after all (the loss does not stay)."""

    def problems(self, recipe: Sections) -> Problems:
        if not recipe.stages:
            return
        model = recipe.model
        for rule in stage_problems(model, recipe.stages):
            yield "stages", rule
        kinds = _kinds(recipe.stages)
        wider = sorted(kinds & {"pad", "width"})
        # Without norms, or drawn by the width, the logits grow with it.
        if wider and (not model.norm_facts.vectors or model.init_facts.std is None):
            key = f'norm = "{model.norm}"'
            if model.norm_facts.vectors:
                key = f'init = "{model.init}"'
            rule = (
                f"operator {wider[0]} does not keep the loss with model.{key},"
                " whose logits grow with the width; grow in depth"
            )
            yield "stages", rule
        inserts_identity = "depth" in kinds and self.depth == "identity"
        if inserts_identity and not model.norm_facts.vectors:
            rule = (
                'must not be "identity" with model.norm = "none":'
                ' inserted layers are the identity by layer norms of 0; take "zero_out_proj"'
            )
            yield "staged_growth.depth", rule
        if "pad" in kinds and model.norm_facts.is_centered:
            rule = (
                'operator pad needs model.norm = "rmsnorm":'
                " zeros beside the channels move a layer norm's mean; take width"
            )
            yield "stages", rule
        if inserts_identity and not model.mlp_facts.has_slope_at_zero:
            rule = (
                f'must not be "identity" with model.mlp = "{model.mlp}",'
                ' whose new layers would never learn; take "zero_out_proj"'
            )
            yield "staged_growth.depth", rule
        for index, stage in enumerate(recipe.stages):
            if stage.lr is not None and stage.lr < recipe.optim.min_lr:
                rule = (
                    f"stage {index}: lr = {stage.lr:g} must not be"
                    f" less than optim.min_lr = {recipe.optim.min_lr:g}, where its decay ends"
                )
                yield "stages", rule

    def warnings(self, recipe: Sections) -> Iterator[str]:
        if self.symmetry == "none" and "width" in _kinds(recipe.stages):
            yield (
                'staged_growth.symmetry = "none":'
                " without dropout nothing makes the copies of a widened model differ,"
                ' and it learns no more than the narrow one; take "offdiag"'
            )

    def assumptions(self, recipe: Sections) -> list[str]:
        lines = []
        for index, stage in enumerate(recipe.stages):
            switch = stage.switch
            if switch is None or not switch.reads_val_loss():
                continue
            end = "the end of the budget"
            if switch.latest is not None:
                end = f"{switch.latest:,} tokens, its latest"
            rule = f'Stage {index} ends by the validation loss, rule "{switch.rule}"'
            lines.append(f"{rule}; the plan assumes {end}.")
        return lines

    def shortened(self, recipe: Sections, half: int, batch_size: int) -> Changes:
        stages = list(recipe.stages)
        for index, stage in enumerate(stages):
            if stage.switch is not None:
                switch = Switch(rule="steps", value=half + index)
                stages[index] = replace(stage, switch=switch)
        return {"stages": tuple(stages)}

    def without_schedule(self) -> Changes:
        return {"stages": ()}  # the model that they end with

    def preserves_loss(self, operators: Iterable[Operator]) -> bool:
        """Return whether these operators, in this section's variants, claim to leave loss and
        logits as they are."""
        exact_depth = self.depth in ("identity", "zero_out_proj")
        return exact_depth or all(kind != "depth" for kind, _ in operators)
