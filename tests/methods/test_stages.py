"""The messages about the stages of a recipe."""

from __future__ import annotations

from tests.methods.cases import check_messages

STAGED = (
    "stages=[{model = {n_layer = 1, n_head = 1, n_embd = 8},"
    " switch = {rule = 'tokens', value = 256}},"
    " {operators = ['depth'], switch = {rule = 'steps', value = 4}}, {operators = ['width']}]"
)
MESSAGES = """
model.n_layer=8
stages=[{model={n_layer=1}, switch={rule='steps', value=1}}, {}, {}, {operators=['depth']}]
stages.1.operators=['depth']
stages.1.switch={rule = 'loss', value = 3, latest = 320}
stages.2.operators=['depth']
stages.2.switch={rule = 'slope', value = -0.05}
    assumed: Stage 1 ends by the validation loss, rule "loss"; the plan assumes 320 tokens, its
    latest.
    assumed: Stage 2 ends by the validation loss, rule "slope"; the plan assumes the end of the
    budget.

stages=[{}]
    stages: one stage is not staged training: add a second [[stages]] with operators, or remove this
    one

staged
stages.0.operators=["depth"]
    stages: stage 0 has operators, but nothing to grow from; write them into the stage that they
    begin

staged
stages.1.operators=[]
    stages: stage 1 has no operators; say how its model grows, as in operators = ["depth"] or the
    operators end at n_layer = 1, but [model] has 2: the last stage trains [model]; change stage 0's
    model or the operators

staged
stages.1.operators=["width:1.5"]
    stages.1.operators: item 1 'width:1.5': the factor must be a whole number: the operators repeat
    whole copies; write 'width' or 'width:3'

staged
stages.1.operators=["pad"]
    stages.1.operators: item 1 'pad': write the new size, as in 'pad:192'

staged
stages.1.operators=["depth:1"]
    stages.1.operators: item 1 'depth:1': the factor must be 2 or more; growth makes no model
    smaller

staged
stages.1.operators=["deep"]
    stages.1.operators: item 1 'deep' is not a growth operator; there are width and depth, with a
    factor as in 'width:3', and with a size pad:192, d_ff:512 and n_kv_head:4

staged
stages.0.switch=false
    stages: stage 0 has no switch; say when it ends, as in switch = { rule = "tokens", value =
    "100M" }

staged
stages.2.switch={rule = "steps", value = 50}
    stages: stage 2 is the last and ends with train.tokens; remove its switch

staged
stages.0.model.n_layer=3
    stages: the operators end at n_layer = 6, but [model] has 2: the last stage trains [model];
    change stage 0's model or the operators

staged
stages.1.model.n_layer=3
    stages: stage 1: model.n_layer = 3, but its operators make 2 of the stage before

staged
stages.0.model.n_head=3
    stages: stage 0: n_head = 3 must divide n_embd = 8: every head has n_embd / n_head channels; or
    set head_dim or stage 1: n_head = 3 must divide n_embd = 8: every head has n_embd / n_head
    channels; or set head_dim or the operators end at n_head = 6, but [model] has 2: the last stage
    trains [model]; change stage 0's model or the operators or the operators end at n_kv_head = 6,
    but [model] has 2: the last stage trains [model]; change stage 0's model or the operators or the
    operators end at head_dim = 2, but [model] has 8: the last stage trains [model]; change stage
    0's model or the operators

staged
stages.0.switch.value=0
    stages: stage 0: switch.value = 0 must be positive

staged
stages.0.switch={rule = "steps", value = -1}
    stages: stage 0: switch.value = -1 must be positive

staged
stages.0.switch={rule = "slope", value = 0}
    stages: stage 0: switch.value = 0: the loss falls, so the slope to wait for is negative, as in
    -0.0575

staged
stages.0.switch={rule = "steps", value = 5}
    stages: stage 1: switch.value = 4 must not be less than an earlier stage's 5

staged
stages.0.switch={rule = "loss", value = 2}
stages.1.switch={rule = "loss", value = 3}
    stages: stage 1: switch.value = 3 must not be more than an earlier stage's 2

staged
optim.min_lr=2e-5
stages.1.lr=1e-5
    stages: stage 1: lr = 1e-05 must not be less than optim.min_lr = 2e-05, where its decay ends

staged
model.norm=none
    stages: operator width does not keep the loss with model.norm = "none", whose logits grow with
    the width; grow in depth

staged
model.init=unit
    stages: operator width does not keep the loss with model.init = "unit", whose logits grow with
    the width; grow in depth

staged
model.norm=none
staged_growth.depth=identity
    stages: operator width does not keep the loss with model.norm = "none", whose logits grow with
    the width; grow in depth
    staged_growth.depth: must not be "identity" with model.norm = "none": inserted layers are the
    identity by layer norms of 0; take "zero_out_proj"

staged
model.mlp=relu2
staged_growth.depth=identity
    staged_growth.depth: must not be "identity" with model.mlp = "relu2", whose new layers would
    never learn; take "zero_out_proj"

stages=[{model = {n_embd = 18}, switch = {rule = "steps", value = 3}}, {operators = ["pad:16"]}]
    stages: stage 1: pad:16 is less than the stage before's n_embd = 18; growth makes no model
    smaller or the operators end at head_dim = 9, but [model] has 8: the last stage trains [model];
    change stage 0's model or the operators or the operators end at d_ff = 72, but [model] has 64:
    the last stage trains [model]; change stage 0's model or the operators or the operators end at
    norm_eps = 1.125e-05, but [model] has 1e-05: the last stage trains [model]; change stage 0's
    model or the operators or operator pad needs model.norm = "rmsnorm": zeros beside the channels
    move a layer norm's mean; take width

staged
stages.0.switch={rule = "steps", value = 0}

staged
stages.0.switch={rule = "steps", value = 4}
optim.min_lr=1e-3
stages.1.lr=1e-3
"""


def test_messages_about_stages():
    check_messages(MESSAGES.replace("staged\n", STAGED + "\n"))
