"""The rules between the sections of a recipe: what cannot work, and what is legal and probably not meant."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from efftrain_cli.methods.batch_size_warmup import BatchSizeWarmup
from efftrain_cli.methods.seq_len_warmup import SeqLenWarmup
from efftrain_cli.methods.simigrad import SimiGrad
from efftrain_cli.methods.staged_growth import StagedGrowth, stage_problems
from efftrain_cli.recipe.check import UnknownValue
from efftrain_cli.recipe.sections import Model, Optim, Train

if TYPE_CHECKING:
    from efftrain_cli.recipe.recipe import Recipe


def breaches_between(sections: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(dotted key, rule) of every combination that cannot work. A rule is skipped where a value it needs is itself wrong."""
    for rule in (_model_rules, _optim_rules, _warmup_rules, _batch_size_rules, _simigrad_rules, _stage_rules):
        found = rule(sections)
        with suppress(UnknownValue):
            yield from found


def _model_rules(sections: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    model: Model | None = sections.get("model")
    if model and model.n_embd % model.n_head:
        yield "model.n_head", f"must divide model.n_embd = {model.n_embd}: every head has n_embd / n_head channels"


def _optim_rules(sections: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    optim: Optim | None = sections.get("optim")
    if optim is None:
        return
    if optim.decay_tokens is not None and optim.decay_steps is not None:
        yield (
            "optim.decay_steps",
            f"optim.decay_tokens = {optim.decay_tokens:_} schedules the same decay; keep one and set the other to false",
        )
    if optim.decay_steps is not None and optim.decay_steps <= optim.warmup_steps:
        yield "optim.decay_steps", f"must lie beyond optim.warmup_steps = {optim.warmup_steps}, where the decay begins"
    if optim.schedule == "wsd" and optim.decay_share is None:
        yield "optim.decay_share", 'is needed with optim.schedule = "wsd": the share of the budget that decays, usually 0.1 to 0.2'
    if optim.schedule != "wsd" and optim.decay_share is not None:
        yield "optim.decay_share", f'needs optim.schedule = "wsd"; with "{optim.schedule}" nothing reads it: set it to false'
    if optim.name == "muon" and optim.muon_lr is None:
        yield "optim.muon_lr", 'is needed with optim.name = "muon": the learning rate of the blocks\' matrices, usually about 0.02'
    if optim.name != "muon" and optim.muon_lr is not None:
        yield "optim.muon_lr", f'needs optim.name = "muon"; with "{optim.name}" nothing reads it: set it to false'
    staged_growth: StagedGrowth | None = sections.get("staged_growth")
    if optim.name == "muon" and staged_growth is not None and staged_growth.dynamics == "small":
        yield (
            "staged_growth.dynamics",
            'must be "target" with optim.name = "muon": the small model\'s dynamics are derived for AdamW',
        )
    if optim.min_lr > optim.lr:
        yield "optim.min_lr", f"must not exceed optim.lr = {optim.lr:g}, the peak that the decay starts from"


def _warmup_rules(sections: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    model: Model | None = sections.get("model")
    train: Train | None = sections.get("train")
    slw: SeqLenWarmup | None = sections.get("seq_len_warmup")
    ramp: BatchSizeWarmup | None = sections.get("batch_size_warmup")
    simigrad: SimiGrad | None = sections.get("simigrad")
    if model and train and slw:
        # Under SimiGrad only the smallest batch is known; the tokens are then a lower bound.
        batch_size = simigrad.lowest if simigrad else train.batch_size
        for name, rule in slw.problems(model.seq_len, batch_size, train.tokens):
            yield f"seq_len_warmup.{name}", rule
    if model and train and ramp:
        for name, rule in ramp.problems(train.batch_size, model.seq_len, train.tokens):
            yield f"batch_size_warmup.{name}", rule


def _batch_size_rules(sections: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if sections.get("batch_size_warmup") is None:
        return
    if sections.get("seq_len_warmup") is not None:
        yield (
            "batch_size_warmup",
            "cannot be combined with seq_len_warmup: both take tokens from the early steps, which would shrink them twice; "
            "set one of the two to false",
        )
    if sections.get("simigrad") is not None:
        yield (
            "batch_size_warmup",
            "cannot be combined with simigrad: both decide the batch size; set one of the two to false",
        )


def _simigrad_rules(sections: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    train: Train | None = sections.get("train")
    simigrad: SimiGrad | None = sections.get("simigrad")
    if train is None or simigrad is None:
        return
    if train.batch_size % simigrad.quantum:
        yield "train.batch_size", f"must be a multiple of simigrad.quantum = {simigrad.quantum}: SimiGrad starts from it"
    elif not simigrad.lowest <= train.batch_size <= simigrad.highest:
        yield (
            "train.batch_size",
            f"must lie within SimiGrad's bounds, {simigrad.lowest} to {simigrad.highest} sequences: SimiGrad starts from it",
        )


def _stage_rules(sections: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    model: Model | None = sections.get("model")
    stages = sections.get("stages")
    if model and stages:
        yield from (("stages", rule) for rule in stage_problems(shape_of(model), stages))
    optim: Optim | None = sections.get("optim")
    if optim and stages:
        for index, stage in enumerate(stages):
            if stage.lr is not None and stage.lr < optim.min_lr:
                rule = f"stage {index}: lr = {stage.lr:g} must not be less than optim.min_lr = {optim.min_lr:g}, where its decay ends"
                yield "stages", rule


def warnings_of(recipe: Recipe) -> list[str]:
    """What is legal and probably not meant, one sentence each; `pretrain` prints them before step 1."""
    found = []
    model, optim, train, slw = recipe.model, recipe.optim, recipe.train, recipe.seq_len_warmup
    step_tokens = train.batch_size * model.seq_len
    steps = math.ceil(train.tokens / step_tokens)
    if train.tokens < step_tokens:
        found.append(f"train.tokens = {train.tokens:_} is less than one full step, {step_tokens:_} tokens")
    if train.micro_batch_tokens < model.seq_len:
        found.append(
            f"train.micro_batch_tokens = {train.micro_batch_tokens:_} is less than one sequence of {model.seq_len} tokens: "
            "a forward pass holds one sequence all the same"
        )
    varies = slw or recipe.batch_size_warmup or recipe.simigrad  # steps is then only a lower bound
    if optim.warmup_steps >= steps and not varies:
        found.append(
            f"optim.warmup_steps = {optim.warmup_steps}, but the budget ends after {steps} steps: "
            "the learning rate never reaches its peak"
        )
    if optim.schedule == "constant" and not (optim.decay_tokens is None and optim.decay_steps is None):
        found.append('optim.schedule = "constant" does not decay: decay_tokens and decay_steps have no effect')
    elif optim.decay_tokens is not None and optim.decay_tokens > train.tokens:
        found.append(
            f"optim.decay_tokens = {optim.decay_tokens:_} lies beyond the budget, train.tokens = {train.tokens:_}: "
            "the learning rate never reaches min_lr"
        )
    elif optim.decay_steps is not None and optim.decay_steps > steps and not varies:
        found.append(
            f"optim.decay_steps = {optim.decay_steps} lies beyond the budget's {steps} steps: "
            "the learning rate never reaches min_lr"
        )
    if optim.schedule != "constant" and optim.decay_steps is not None and recipe.simigrad:
        found.append(
            "optim.decay_steps decays by steps, and SimiGrad makes their number unknown; decay by tokens instead "
            "(decay_steps = false)"
        )
    elif optim.schedule != "constant" and optim.decay_steps is not None and (slw or recipe.batch_size_warmup):
        found.append(
            "optim.decay_steps decays by steps while early steps hold fewer tokens: the learning rate falls too early; "
            "decay by tokens instead (decay_steps = false)"
        )
    if recipe.simigrad:
        found += recipe.simigrad.warnings(train.batch_size)
        if slw:
            found.append(
                "simigrad with seq_len_warmup: the similarity rises with the tokens in a sequence, so the batch will first grow "
                "and then shrink as sequences lengthen; run each alone before combining them"
            )
    if recipe.progressive_layer_drop:
        found += recipe.progressive_layer_drop.warnings(None if varies else steps)
    return found


def shape_of(model: Model) -> tuple[int, int, int]:
    """What growth changes of a model: (n_layer, n_head, n_embd)."""
    return model.n_layer, model.n_head, model.n_embd
