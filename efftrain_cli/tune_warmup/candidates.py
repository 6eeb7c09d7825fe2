"""List what a search chooses from: settings with the most wanted first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.plan.preview import summarize_plan
from efftrain_cli.recipe.recipe import Recipe, load_recipe
from efftrain_cli.trials.trial import parse_settings
from efftrain_cli.tune_warmup.search import (
    Candidates,
    Probe,
    Setting,
)


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """What is searched, and how."""

    recipe: str
    """Name or path."""
    settings: Setting = ()
    start: str | None = None
    """`key=value,value`, the most wanted first; None: of a sequence length warmup."""
    duration: str | None = None
    """Likewise."""
    seeds: Sequence[int] = ()
    """Seeds of every setting; empty: three from the recipe's on."""
    steps: int | None = None
    """Steps that a duration is seen for; None: three learning-rate warmups."""
    threshold: float
    """Perplexity over its best so far above which a probe is unstable."""
    budget: float = math.inf
    """Tokens that all probes together may train."""
    name: str | None = None
    """Of the search's folder; None: RECIPE-tune."""
    device: str = "auto"
    devices: int = 1


def find_candidates(config: TuneConfig, recipe: Recipe) -> Candidates:
    """Return what the search chooses from.

    Raises:
        UsageError: a key without values, or a recipe without a learning-rate warmup.
    """
    climb = recipe.optim.warmup_steps
    if climb < 1:
        raise UsageError(
            "probes last as long as the learning-rate warmup, and optim.warmup_steps is 0\n"
            "  set it, for example --set optim.warmup_steps=100"
        )
    starts, durations = default_values(recipe)
    if config.duration is not None:
        starts = [()]
        durations = settings_of("--duration", config.duration)
    if config.start is not None:
        starts = settings_of("--start", config.start)
    section = durations[0][0].partition(".")[0]
    control: Setting = (f"{section}=false",)
    if section == "optim":
        control = starts[0] + durations[0]
    horizons = []
    is_own = []
    for duration in durations:
        varied = recipe_with(config, starts[0] + duration)
        wanted = config.steps or 3 * varied.optim.warmup_steps
        # The run may end before.
        horizons.append(summarize_plan(varied, until=wanted).steps)
        is_own.append(varied == recipe)
    return Candidates(
        starts=starts,
        durations=durations,
        first=is_own.index(True) if any(is_own) else len(durations) // 2,
        control=control,
        climb=climb,
        horizons=horizons,
        seeds=config.seeds or range(recipe.seed, recipe.seed + 3),
    )


def settings_of(option: str, text: str) -> list[Setting]:
    """Return a setting for each value of `key=value,value`.

    Raises:
        UsageError: there are fewer than two.
    """
    ((key, values),) = parse_settings([text]).items()
    if len(values) < 2:
        raise UsageError(
            f"{option} {text!r} has one value, so nothing is searched\n"
            "  give several, the most wanted first"
        )
    return [(f"{key}={value}",) for value in values]


def default_values(recipe: Recipe) -> tuple[list[Setting], list[Setting]]:
    """Return starts and durations of a sequence length warmup around the recipe's own.

    Starts double from the recipe's on. Durations are factors of about 1.4 apart, from the
    learning-rate warmup to 0.66 of the run: the longest of the paper's authors took 63 %.
    """
    warmup = recipe.seq_len_warmup
    climb = recipe.optim.warmup_steps
    full_steps = recipe.train.tokens // (recipe.train.batch_size * recipe.model.seq_len)
    start = 8
    steps = max(climb, full_steps // 3)
    if warmup is not None and warmup.steps is not None:
        start = warmup.start
        steps = warmup.steps
    starts: list[Setting] = []
    while start < recipe.model.seq_len:
        starts.append((f"seq_len_warmup.start={start}",))
        start *= 2
    # The mean length of a warmup is about half the full one.
    longest = 2 * 0.66 * full_steps
    around = {steps}
    for power in range(-20, 21):
        duration = round(steps * 2 ** (power / 2))
        if climb <= duration <= longest:
            around.add(duration)
    return starts, [(f"seq_len_warmup.steps={n}",) for n in sorted(around, reverse=True)]


@cache
def recipe_with(config: TuneConfig, setting: Setting) -> Recipe:
    """Return the searched recipe with a setting."""
    return load_recipe(config.recipe, (*config.settings, *setting))


def tokens_of(config: TuneConfig, probe: Probe) -> int:
    """Return the tokens that a probe has trained at its horizon."""
    return summarize_plan(recipe_with(config, probe.setting), until=probe.horizon).tokens
