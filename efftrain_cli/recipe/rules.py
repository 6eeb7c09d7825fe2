"""The rules between the sections of a recipe: what cannot work, and what is legal and probably not
meant.

Rules that concern one method are that method's `problems` and `warnings`.
"""

from __future__ import annotations

import math
from itertools import pairwise

from efftrain_cli.methods.method import Problems, Sections, varying
from efftrain_cli.recipe.schedules import SCHEDULES


def rules_between(recipe: Sections) -> Problems:
    """Yield (dotted key, rule) of each combination that cannot work."""
    for name, rule in recipe.model.validation_errors():
        yield f"model.{name}", rule
    yield from _data_rules(recipe)
    yield from _optim_rules(recipe)
    yield from _train_rules(recipe)
    yield from _parallel_rules(recipe)
    yield from _method_rules(recipe)


def _data_rules(recipe: Sections) -> Problems:
    data = recipe.data
    if data.sources is None:
        return
    if not data.sources:
        yield "data.sources", "names no text: give one [[data.sources]] or more, or leave it out"
    elif data.train != "stdlib":
        rule = (
            "names training text beside [[data.sources]]:"
            " move it into one of them and set data.train = false"
        )
        yield "data.train", rule
    total = sum(source.weight for source in data.sources)
    for number, source in enumerate(data.sources):
        if source.weight < 1e-3 * total:
            rule = "a weight is at least a thousandth of the sum of the weights"
            yield "data.sources", f"source {number} ({source.path!r}): {rule}, {total:g}"


def _optim_rules(recipe: Sections) -> Problems:
    optim = recipe.optim
    if optim.decay_tokens and optim.decay_steps:
        same = f"optim.decay_tokens = {optim.decay_tokens:,} schedules the same decay"
        yield "optim.decay_steps", f"{same}; keep one and set the other to false"
    if optim.decay_steps and optim.decay_steps <= optim.warmup_steps:
        yield (
            "optim.decay_steps",
            f"must lie beyond optim.warmup_steps = {optim.warmup_steps}, where the decay begins",
        )
    schedule = SCHEDULES[optim.schedule]
    if schedule.has_plateau and optim.decay_share is None:
        rule = (
            f'is needed with optim.schedule = "{optim.schedule}":'
            " the share of the budget that decays, usually 0.1 to 0.2"
        )
        yield "optim.decay_share", rule
    if schedule.needs_warmup and not optim.warmup_steps:
        rule = (
            f'must be at least 1 with optim.schedule = "{optim.schedule}",'
            " whose decay is relative to the warmup"
        )
        yield "optim.warmup_steps", rule
    facts = optim.facts
    if facts.has_muon_lr and optim.muon_lr is None and optim.muon_scale != "match_rms_adamw":
        rule = (
            f'is needed with optim.name = "{optim.name}":'
            " the learning rate of the blocks' matrices, usually about 0.02;"
            ' or set optim.muon_scale = "match_rms_adamw", with which it is optim.lr'
        )
        yield "optim.muon_lr", rule
    read = (
        ("decay_share", optim.decay_share, 'optim.schedule = "wsd"', schedule.has_plateau),
        ("decay_shape", optim.decay_shape, 'optim.schedule = "wsd"', schedule.has_plateau),
        ("muon_lr", optim.muon_lr, 'optim.name = "muon"', facts.has_muon_lr),
        ("muon_scale", optim.muon_scale, 'optim.name = "muon"', facts.has_muon_lr),
        ("beta2_tokens", optim.beta2_tokens, "a second moment", facts.has_second_moment),
    )
    for key, value, reader, is_read in read:
        if value is not None and not is_read:
            yield f"optim.{key}", f"needs {reader}; nothing else reads it: set it to false"
    if optim.z_loss and recipe.delayed_gradients is not None:
        yield "optim.z_loss", "must be 0 with ouroboros, which minimizes the cross-entropy alone"
    if optim.min_lr > optim.lr:
        yield (
            "optim.min_lr",
            f"must not exceed optim.lr = {optim.lr:g}, the peak that the decay starts from",
        )


def _train_rules(recipe: Sections) -> Problems:
    train = recipe.train
    if "length" in recipe.varies:
        return  # the lengths' own rule holds their whole warmup against the budget
    bounds = [method.batch_bounds(train.batch_size) for method in recipe.methods.values()]
    sequences = min((smallest for smallest, _ in bounds), default=train.batch_size)
    first_step = sequences * recipe.model.seq_len
    if first_step > 1.5 * train.tokens:
        yield (
            "train.tokens",
            f"{train.tokens:,} is less than two thirds of the first step, {first_step:,} tokens:"
            f" {sequences:,} sequences of {recipe.model.seq_len:,};"
            " raise it, or lower train.batch_size",
        )


def _method_rules(recipe: Sections) -> Problems:
    for one, other in pairwise(varying(recipe.methods, "batch")):
        yield (
            one,
            f"cannot be combined with {other}: both decide the batch size;"
            " set one of the two to false",
        )
    for method in recipe.methods.values():
        yield from method.problems(recipe)


def _parallel_rules(recipe: Sections) -> Problems:
    if recipe.is_sharded:
        unable = {
            f'optim.name = "{recipe.optim.name}"': not recipe.optim.facts.supports_sharding,
            **{name: not method.supports_sharding for name, method in recipe.methods.items()},
            "stages": bool(recipe.stages),
            "eval.sample": recipe.eval.sample is not None,
            "eval.positions": recipe.eval.positions,
        }
        present = [name for name, is_present in unable.items() if is_present]
        if present:
            yield (
                "parallel.strategy",
                f'"shard" works without {", ".join(present)}: take this out, or replicate',
            )


def warnings_of(recipe: Sections) -> list[str]:
    """List what is legal and probably not meant, one sentence each; `pretrain` prints them before
    step 1."""
    warnings = []
    model = recipe.model
    optim = recipe.optim
    train = recipe.train
    steps = recipe.full_steps or math.inf
    step_tokens = train.batch_size * model.seq_len
    if train.tokens < step_tokens:
        warnings.append(
            f"train.tokens = {train.tokens:,} is less than one full step, {step_tokens:,} tokens"
        )
    if optim.lr > 0.1:
        warnings.append(
            f"optim.lr = {optim.lr:g}: {optim.name} moves a weight by up to about the rate in a"
            " step, so training will diverge; 1e-5 to 1e-2 is usual"
        )
    if train.micro_batch_tokens < model.seq_len:
        warnings.append(
            f"train.micro_batch_tokens = {train.micro_batch_tokens:,} is less than one sequence"
            f" of {model.seq_len:,} tokens: a forward pass holds one sequence anyway"
        )
    if optim.warmup_steps > steps:
        warnings.append(
            f"optim.warmup_steps = {optim.warmup_steps:,},"
            f" but the budget ends after {steps:,} steps: the learning rate never reaches its peak"
        )
    elif optim.warmup_steps > steps / 2:
        warnings.append(
            f"optim.warmup_steps = {optim.warmup_steps:,} is"
            f" {100 * optim.warmup_steps / steps:.0f} % of the run's {steps:,} steps:"
            " the learning rate climbs for most of the run; 1 to 10 % is usual"
        )
    if not optim.has_end and (optim.decay_tokens or optim.decay_steps):
        warnings.append(
            f'optim.schedule = "{optim.schedule}" has no end:'
            " decay_tokens and decay_steps have no effect"
        )
    elif optim.decay_tokens and optim.decay_tokens > train.tokens:
        warnings.append(
            f"optim.decay_tokens = {optim.decay_tokens:,} lies beyond the budget,"
            f" train.tokens = {train.tokens:,}: the learning rate never reaches min_lr"
        )
    elif optim.decay_steps and optim.decay_steps > steps:
        warnings.append(
            f"optim.decay_steps = {optim.decay_steps:,} lies beyond the budget's {steps:,} steps: "
            "the learning rate never reaches min_lr"
        )
    slw = recipe.methods.get("seq_len_warmup")
    keeps_tokens = slw is not None and slw.batch == "tokens"
    early = recipe.varies & {"length", "batch"} and not keeps_tokens
    if early and "steps" not in recipe.varies and optim.has_end and optim.decay_steps:
        warnings.append(
            "optim.decay_steps decays by steps while early steps hold fewer tokens:"
            " the learning rate falls too early; decay by tokens instead (decay_steps = false)"
        )
    for method in recipe.methods.values():
        warnings += method.warnings(recipe)
    return warnings
