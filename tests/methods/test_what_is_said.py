"""What the methods say of a recipe before it runs, the values that they refuse, and what is left of
their schedules in a short run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from efftrain_cli.foundation.errors import RecipeError
from efftrain_cli.plan.plan import plan_run, shorten_schedules
from tests.tiny import tiny_recipe

# 640 tokens are 5 steps of 8 sequences of 16, two in a micro-batch. theta: 0.5 exp(-0.1 x 4) + 0.5.
# The learning rate: sqrt(128 / 8) = 4, and more.
SAID = """
progressive_layer_drop.steps=10
    assumed: Layer dropping draws blocks at random; FLOPs are planned at their expectation.

progressive_layer_drop={steps = 1000, theta = 1.0}
    assumed: Layer dropping draws blocks at random; FLOPs are planned at their expectation.

progressive_layer_drop.steps=1000
    assumed: Layer dropping draws blocks at random; FLOPs are planned at their expectation.
    warning: progressive_layer_drop.steps = 1000 sets the pace for a run of that many steps, and
    this run has 5: theta only comes down to 0.84, and fewer blocks are skipped than meant; set it
    to the steps of the run

ouroboros={modules = 1, warmup_steps = 5}

ouroboros.modules=2
    assumed: Ouroboros: 2 modules on gradients of 1 to 0 steps ago, the last fresh. A module waits
    unchanged for its first one; the last ones in flight are dropped.

ouroboros={modules = 4, warmup_steps = 4}
    assumed: Ouroboros: 4 modules on gradients of 3 to 0 steps ago, the last fresh, after 4 steps of
    ordinary training. A module waits unchanged for its first one; the last ones in flight are
    dropped.

ouroboros={modules = 3, warmup_steps = 5}
    assumed: Ouroboros: 3 modules on gradients of 2 to 0 steps ago, the last fresh, after 5 steps of
    ordinary training. A module waits unchanged for its first one; the last ones in flight are
    dropped.
    warning: ouroboros.warmup_steps = 5 is the whole run of 5 steps: no gradient is ever delayed

simigrad={target = 0.5, min_batch_size = 2, max_batch_size = 128}
    assumed: SimiGrad decides the batch size from gradients as they come; the plan assumes that it
    stays as it is, at first train.batch_size = 8.

simigrad={target = 0.5, min_batch_size = 2, max_batch_size = 137}
optim.decay_steps=4
seq_len_warmup.steps=2
    assumed: SimiGrad decides the batch size from gradients as they come; the plan assumes that it
    stays as it is, at first train.batch_size = 8.
    warning: optim.decay_steps decays by steps, and SimiGrad makes their number unknown; decay by
    tokens instead (decay_steps = false)
    warning: simigrad.lr_scaling = 'sqrt' can raise the learning rate to 4.1 times the schedule's,
    when the batch reaches max_batch_size = 137; lower that bound, or check that the rate is stable
    warning: simigrad with seq_len_warmup: the similarity rises with the tokens in a sequence, so
    the batch will first grow and then shrink as sequences lengthen; run each alone before combining
    them

standardization_loss.weight=10
    assumed: The standardization loss at 4 sites is averaged with weight 10; the paper's lambda, a
    factor of the sum, is 0.0446. Moments are of each micro-batch of train.micro_batch_tokens, a
    setting of this method.

standardization_loss={weight = 11, sites = "ln_input"}
    assumed: The standardization loss at 5 sites is averaged with weight 11; the paper's lambda, a
    factor of the sum, is 0.138. Moments are of each micro-batch of train.micro_batch_tokens, a
    setting of this method.
    warning: standardization_loss.sites = "ln_input" with model.norm = "layernorm": the forward pass
    ignores the scale that is asked for, as each norm divides it out; the term only changes what the
    residual stream looks like
    warning: standardization_loss.weight = 11 multiplies a mean of nats per channel, not the paper's
    sum over channels: beside a cross-entropy of a few nats 0.01 to 1 is usual

chunked_accumulation={fidelity = "hardware", operands = "fp8_e4m3"}
train.dtype=bf16
    assumed: Linear layers multiply in fp8 where the device can; on a CPU fast_accumulation has no
    effect.

chunked_accumulation.grad_weight.chunk=31
    assumed: Narrow accumulators are emulated (fidelity "blocked"), so steps take longer than
    fp32's; the papers' savings are those of special hardware.

chunked_accumulation.grad_weight.chunk=32
train.dtype=bf16
    assumed: Narrow accumulators are emulated (fidelity "blocked"), so steps take longer than
    fp32's; the papers' savings are those of special hardware.
    warning: chunked_accumulation.grad_weight.chunk = 32 is no shorter than any sum of the blocks,
    the longest being 32: nothing is cut into chunks
    warning: train.dtype = "bf16" acts outside the layers of chunked_accumulation only: those take
    their operands in fp32, add as they say, and round only their result to bf16

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
"""


def told(lines: list[str]) -> str:
    """Join the indented lines of a case; the others are overrides."""
    return " ".join(line.strip() for line in lines if line.startswith(" "))


def test_assumptions_and_warnings():
    for case in SAID.strip().split("\n\n"):
        lines = case.splitlines()
        recipe = tiny_recipe(*(line for line in lines if not line.startswith(" ")))
        found = []
        for method in recipe.methods.values():
            found += [f"assumed: {line}" for line in method.assumptions(recipe)]
        for method in recipe.methods.values():
            found += [f"warning: {line}" for line in method.warnings(recipe)]
        assert " ".join(found) == told(lines), case


STAGED = (
    "stages=[{model = {n_layer = 1, n_head = 1, n_embd = 8},"
    " switch = {rule = 'tokens', value = 256}},"
    " {operators = ['depth'], switch = {rule = 'steps', value = 4}}, {operators = ['width']}]"
)
REFUSED = """
batch_size_warmup={start = 9, increment = 3, sequences = 40}
    batch_size_warmup.start: 9 sequences is above the final batch, train.batch_size = 8; start below
    it

batch_size_warmup={start = 2, increment = 4, sequences = 40}
    batch_size_warmup.increment: 4 does not divide the 6 sequences between start = 2 and
    train.batch_size = 8, so the ramp would not end at it

batch_size_warmup={start = 2, increment = 3, sequences = 41}
    batch_size_warmup.sequences: 41 is beyond the budget: the ramp alone trains 656 tokens,
    train.tokens is 640; lower it to at most 40, or raise train.tokens

batch_size_warmup={start = 2, increment = 3, sequences = 641}
seq_len_warmup.steps=3
    batch_size_warmup.sequences: 641 is beyond the budget: the ramp alone trains 641 tokens,
    train.tokens is 640; lower it to at most 640, or raise train.tokens

batch_size_warmup={start = 2, increment = 3}
    batch_size_warmup.sequences: or switch is needed, and not both: the length of the ramp in
    sequences, or the tokens after which the batch grows

batch_size_warmup={start = 2, increment = 3, sequences = 40, switch = [100, 200]}
    batch_size_warmup.sequences: or switch is needed, and not both: the length of the ramp in
    sequences, or the tokens after which the batch grows

batch_size_warmup={start = 2, increment = 3, switch = [100]}
    batch_size_warmup.switch: has 1 entries, and from start = 2 it takes 2 of increment = 3 to
    train.batch_size = 8

batch_size_warmup={start = 2, increment = 3, switch = [100, 100]}
    batch_size_warmup.switch: rises from above 0 to below train.tokens = 640

batch_size_warmup={start = 2, increment = 3, switch = [100, 640]}
    batch_size_warmup.switch: rises from above 0 to below train.tokens = 640

seq_len_warmup={}
    seq_len_warmup.steps: steps is missing: the optimizer step at which the full length is reached

seq_len_warmup={steps = 9, until = [5]}
    seq_len_warmup.until: until = [5] needs pacing = "discrete", but pacing is "linear"

seq_len_warmup={pacing = "discrete"}
    seq_len_warmup.pacing: pacing = "discrete" needs lengths, such as [128, 1024], and until, such
    as [15000]

seq_len_warmup={pacing = "discrete", lengths = [8, 16]}
    seq_len_warmup.lengths: lengths has 2 phases and until 0 ends; until names the last step of each
    phase but the final one, so it needs 1

seq_len_warmup={pacing = "discrete", lengths = [8, 16], until = [2], steps = 9}
    seq_len_warmup.steps: steps = 9 has no effect with pacing = "discrete"; until says when to
    lengthen

seq_len_warmup={pacing = "discrete", lengths = [0, 8, 16], until = [0, 0]}
    seq_len_warmup.lengths: lengths = [0, 8, 16]: a length is at least 1 token; until = [0, 0]:
    steps are 1 or more and rise from phase to phase

seq_len_warmup={steps = 3, batch = "tokens", mode = "truncate"}
    seq_len_warmup.batch: batch = "tokens" fills a step with further sequences of the same windows,
    and mode = "truncate" drops them; set mode = "reshape", or batch = "sequences"

seq_len_warmup={steps = 3, start = 17}
    seq_len_warmup.start: 17 tokens is above the full length, model.seq_len = 16; start below it

seq_len_warmup={pacing = "discrete", lengths = [17, 16], until = [1]}
    seq_len_warmup.lengths: [17, 16]: the last must be model.seq_len = 16, which validation uses,
    and none may be above it

seq_len_warmup={pacing = "discrete", lengths = [8, 8], until = [1]}
    seq_len_warmup.lengths: [8, 8]: the last must be model.seq_len = 16, which validation uses, and
    none may be above it

seq_len_warmup={pacing = "discrete", lengths = [8, 16], until = [11]}
    seq_len_warmup.until: [11] is beyond the budget: the warmup alone trains 704 tokens,
    train.tokens is 640; end the warmup earlier, or raise train.tokens

ouroboros.modules=5
    ouroboros.modules: must be at most model.n_layer + 2 = 4: embedding and head can stand alone,
    the modules between need a block

ouroboros={modules = 3, split = [1, 1, 1]}
    ouroboros.split: must add up to model.n_layer = 2 blocks, not 3

ouroboros={modules = 3, split = [2, 2]}
    ouroboros.split: split [2, 2] names 2 modules, and modules = 3

ouroboros={modules = 3, split = [1, 0, 1]}
    ouroboros.split: split [1, 0, 1]: only the first and the last module can do without a block, as
    they have embedding and head

chunked_accumulation.forward.fast_accumulation=true
    chunked_accumulation.fidelity: fidelity = "blocked" knows no fast_accumulation, given in
    forward: it is a switch of GPUs and needs fidelity = "hardware"; emulation takes bits and chunk

chunked_accumulation={fidelity = "hardware", operands = "fp8_e5m2", forward = {bits = 9}}
    chunked_accumulation.fidelity: fidelity = "hardware" cannot choose bits, chunk and
    exponent_bits, given in forward: a GPU adds as it is built; leave them out and say
    fast_accumulation = true or false; fidelity = "hardware" needs operands = "fp8_e4m3", not
    "fp8_e5m2": fp8 matrix units take it for activations and weights, and none multiplies e5m2 by
    e5m2

chunked_accumulation={fidelity = "hardware"}
    chunked_accumulation.fidelity: fidelity = "hardware" needs operands = "fp8_e4m3", not "fp32":
    fp8 matrix units take it for activations and weights, and none multiplies e5m2 by e5m2; fidelity
    = "hardware" needs gradient_operands "fp8_e5m2" or "fp8_e4m3", not "fp32"

chunked_accumulation.layers=inner
    chunked_accumulation.layers: leaves none of 2 blocks: the first and the last stay fp32; take
    "all", or a deeper model

standardization_loss={weight = 1, sites = "all_linear"}
model.mlp=swiglu
    standardization_loss.sites: must be "preact" or "ln_input" with mlp = "swiglu": c_up is no site

simigrad={target = 0.5, min_batch_size = 9, max_batch_size = 16}
    train.batch_size: must lie within SimiGrad's bounds, 9 to 16 sequences: SimiGrad starts from it

simigrad={target = 0.5, min_batch_size = 2, max_batch_size = 7}
    train.batch_size: must lie within SimiGrad's bounds, 2 to 7 sequences: SimiGrad starts from it

simigrad={target = 0.5, min_batch_size = 2, max_batch_size = 16, quantum = 3}
    train.batch_size: must be a multiple of simigrad.quantum = 3: SimiGrad starts from it

simigrad={target = 0.5, min_batch_size = 9, max_batch_size = 8}
    simigrad.min_batch_size: min_batch_size 9 is above max_batch_size 8; swap them, or set both to
    one value for a fixed batch

simigrad={target = 0.5, min_batch_size = 9, max_batch_size = 11, quantum = 4}
    simigrad.quantum: no multiple of quantum 4 lies between min_batch_size 9 and max_batch_size 11;
    choose a smaller quantum or wider bounds

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

batch_size_warmup={start = 2, increment = 3, sequences = 40}

seq_len_warmup={pacing = "discrete", lengths = [1, 16], until = [1]}

seq_len_warmup={steps = 3, start = 16}

staged
stages.0.switch={rule = "steps", value = 0}

staged
stages.0.switch={rule = "steps", value = 4}
optim.min_lr=1e-3
stages.1.lr=1e-3
"""


def test_mistakes():
    for case in REFUSED.strip().split("\n\n"):
        lines = case.replace("staged\n", STAGED + "\n").splitlines()
        problems = []
        try:
            tiny_recipe(*(line for line in lines if not line.startswith(" ")))
        except RecipeError as error:
            problems = [f"{problem.key}: {problem.rule}" for problem in error.problems]
        assert " ".join(problems) == told(lines), case


BEYOND = """
batch_size_warmup.start=0: must be at least 1
batch_size_warmup.increment=0: must be at least 1
batch_size_warmup.sequences=0: must be at least 1
seq_len_warmup.start=0: must be at least 1
seq_len_warmup.steps=0: must be at least 1
seq_len_warmup.multiple=0: must be at least 1
seq_len_warmup.degree=0: must be at least 1
progressive_layer_drop.theta=0: must be greater than 0
progressive_layer_drop.theta=1.1: must be at most 1
progressive_layer_drop.steps=-1: must be at least 0
simigrad.target=-1: must be greater than -1
simigrad.target=1: must be less than 1
simigrad.min_batch_size=1: must be at least 2
simigrad.max_batch_size=1: must be at least 2
simigrad.quantum=0: must be at least 1
simigrad.interval=0: must be at least 1
simigrad.window=0: must be at least 1
simigrad.lr_adjust_factor=0: must be greater than 0
simigrad.lr_adjust_factor=1.1: must be at most 1
standardization_loss.weight=-1: must be at least 0
standardization_loss.eps=0: must be greater than 0
ouroboros.modules=0: must be at least 1
ouroboros.warmup_steps=-1: must be at least 0
ouroboros.split=[-1]: item 1 must be at least 0
chunked_accumulation.forward.bits=0: must be at least 1
chunked_accumulation.forward.chunk=-1: must be at least 0
chunked_accumulation.forward.exponent_bits=1: must be at least 2
chunked_accumulation.grad_input.bits=24: must be at most 23
chunked_accumulation.grad_input.exponent_bits=9: must be at most 8
stages.0.switch.window=4: must be at least 5
stages.0.switch.times=0: must be at least 1
stages.0.model.norm_eps=0: must be greater than 0
stages.1.lr=0: must be greater than 0
stages.1.rewarmup_steps=-1: must be at least 0
stages.1.schedule_ratio=0: must be greater than 0
stages.1.schedule_ratio=1.1: must be at most 1
"""


def test_values_beyond_their_bounds():
    stages = "stages=[{switch = {rule = 'slope', value = -1}}, {operators = ['depth']}]"
    for line in BEYOND.strip().splitlines():
        override, rule = line.split(": ")
        with pytest.raises(RecipeError) as refused:
            tiny_recipe(stages, override)
        assert (f"--set {override}", rule) in [(p.source, p.rule) for p in refused.value.problems]


SHORT = """
seq_len_warmup.steps=100 -> steps 8
seq_len_warmup.steps=3 -> steps 3
seq_len_warmup={pacing="discrete", lengths=[4, 8, 16, 16], until=[2, 9, 90]} -> until (2, 6, 7)
progressive_layer_drop.steps=9 -> steps 8
progressive_layer_drop.steps=7 -> steps 7
simigrad={target=0.5, min_batch_size = 6, max_batch_size = 9, quantum = 2} -> quantum 1
simigrad={target = 0.5, min_batch_size = 6, max_batch_size = 9} -> min_batch_size 4
simigrad={target = 0.5, min_batch_size = 6, max_batch_size = 9} -> max_batch_size 16
simigrad={target=0.5, min_batch_size = 6, max_batch_size = 9, interval = 7} -> interval 4
simigrad={target=0.5, min_batch_size = 6, max_batch_size = 9, interval=2, window=5} -> window 2
simigrad={target=0.5, min_batch_size = 6, max_batch_size = 9, window = 3} -> window 3
ouroboros={modules = 3, warmup_steps = 9} -> warmup_steps 2
ouroboros={modules = 3, warmup_steps = 1} -> warmup_steps 1
"""


def test_schedules_fit_into_eight_steps():
    """They change before and after step 4, of 8 sequences."""
    for line in SHORT.strip().splitlines():
        override, _, expected = line.partition(" -> ")
        recipe = tiny_recipe("train.tokens=12_800", override)
        shorter = replace(recipe, **shorten_schedules(recipe, 4, 8))
        (method,) = shorter.methods.values()
        key, _, value = expected.partition(" ")
        assert str(getattr(method, key)) == value, line


def test_a_short_ramp_of_the_batch_ends_in_the_middle():
    ramp = "batch_size_warmup={start = 2, increment = 3, switch = [90, 500]}"
    recipe = tiny_recipe("train.tokens=768", ramp)
    shorter = replace(recipe, **shorten_schedules(recipe, 4, 8))
    assert [plan.batch_size for plan, _ in plan_run(shorter)] == [4] * 4 + [8] * 4


def test_stages_of_a_short_run_end_in_the_middle():
    stages = (
        "stages=[{model = {n_layer = 1}, switch = {rule = 'tokens', value = 256}},"
        " {operators = ['depth'], switch = {rule = 'loss', value = 3}}, {operators = ['depth']}]"
    )
    recipe = tiny_recipe("model.n_layer=4", stages)
    *ended, last = shorten_schedules(recipe, 4, 8)["stages"]
    assert [(stage.switch.rule, stage.switch.value) for stage in ended] == [
        ("steps", 4),
        ("steps", 5),
    ]
    assert last == recipe.stages[2]
