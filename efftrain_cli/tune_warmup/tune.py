"""`efftrain tune-warmup`: find a warmup by short probes instead of full runs.

    runs/<name>/
      probes/<setting>-seedN/  a run for each probe
      receipts.csv             every probe: steps, tokens, largest fluctuation, loss
    recipes/<recipe>-tuned.toml  the recipe with the warmup that was found

A probe's receipt is read from its run. So the same command continues a search that was killed, and
one that ran out of budget continues with a larger one.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from efftrain_cli.foundation.console import (
    counted,
    human,
    make_console,
    print_labelled,
    say,
    steady_output,
)
from efftrain_cli.foundation.errors import DivergedError, RecipeError, UsageError
from efftrain_cli.foundation.files import write_whole
from efftrain_cli.plan.describe import LABEL
from efftrain_cli.recipe.draft import (
    Draft,
    apply_override,
    is_path,
    read_recipe_file,
    recipe_folders,
    recipe_name,
)
from efftrain_cli.recipe.recipe import Recipe, load_recipe
from efftrain_cli.recipe.toml import toml_lines
from efftrain_cli.run.directory import run_path
from efftrain_cli.tune_warmup.candidates import TuneConfig, find_candidates, tokens_of
from efftrain_cli.tune_warmup.prober import Prober
from efftrain_cli.tune_warmup.search import (
    BudgetError,
    Candidates,
    Probe,
    Setting,
    Verdict,
    find_best,
    search,
)

MARK = "# Found by `efftrain tune-warmup`"
"""Beginning of a tuned recipe."""


def tune(config: TuneConfig, plan_only: bool = False) -> Path:
    """Run the search, or what is left of it, and return its folder.

    Raises:
        UsageError: nothing to search for, a budget below the first probe, or the folder holds
            something else.
        DivergedError: no setting is recommended; the receipts are written.
    """
    recipe = load_recipe(config.recipe, config.settings)
    name = recipe_name(config.recipe)
    folder = run_path(config.name or f"{name}-tune")
    candidates = find_candidates(config, recipe)
    tuned = Path("recipes") / f"{name}-tuned.toml"
    check_free(tuned)
    prober = Prober(folder=folder, config=config)
    if folder.exists() and not prober.runs.is_dir():
        raise UsageError(f"{folder} exists but holds no search\n  give another --name")
    console = make_console()
    if plan_only:
        print_labelled(console, plan_lines(config, candidates, recipe), LABEL)
        return folder
    verdicts: list[Verdict] = []
    try:
        with steady_output():
            for verdict in search(candidates, prober.see):
                verdicts.append(verdict)
                say(f"{shown(verdict.setting)}, {verdict.horizon:,} steps: {describe(verdict)}")
    except BudgetError as error:
        if not prober.receipts:
            raise UsageError(
                f"--budget {config.budget:,.0f} is below the first probe\n"
                f"  give at least {error.needed}"
            ) from None
        say(f"the budget ended\n  --budget {error.needed} continues from here")
    receipts = folder / "receipts.csv"
    write_whole(receipts, prober.table())
    best = find_best(candidates, verdicts)
    lines = list(result_lines(candidates, verdicts, best))
    lines.append(f"cost    {prober.cost()}")
    if best is None:
        print_labelled(console, lines, LABEL)
        raise DivergedError(
            f"no warmup is recommended; {receipts} has the probes\n  {advice(verdicts)}"
        )
    tuned.parent.mkdir(exist_ok=True)
    write_whole(tuned, tuned_text(config, best))
    lines += [f"recipe  {tuned}", f"next    {race_command(config, best, tuned.stem)}"]
    print_labelled(console, lines, LABEL)
    return folder


def check_free(path: Path) -> None:
    """Refuse a path with a recipe that no search has written.

    Raises:
        UsageError: there is one.
    """
    if path.exists() and not path.read_text("utf-8").startswith(MARK):
        raise UsageError(f"{path} exists and was not written by tune-warmup\n  rename it")


def shown(setting: Setting) -> str:
    """Write a setting without its section: "start=8 steps=60"."""
    return " ".join(re.sub(r"^[^=]*\.", "", text) for text in setting)


def listed(settings: Sequence[Setting]) -> str:
    """Write settings of one key, named once: "start=8, 16, 32"."""
    first, *others = settings
    return ", ".join([shown(first), *(text.partition("=")[2] for (text,) in others)])


def describe(verdict: Verdict) -> str:
    """Describe what the seeds of a setting have shown, with the mean of their last losses."""
    loss = f"loss {verdict.loss:.2f}"
    last = verdict.words[-1]
    seeds = len(verdict.words)
    if verdict.is_stable:
        return f"stable on {counted(seeds, 'seed')} ({loss})"
    steps = [receipt.unstable_at for receipt in verdict.receipts if receipt.unstable_at is not None]
    if not steps:
        return f"{last} on seed {seeds} ({loss})"
    return f"unstable at step {min(steps):,} ({loss})"


def result_lines(
    candidates: Candidates, verdicts: Sequence[Verdict], best: Verdict | None
) -> Iterator[str]:
    """Describe the verdicts on one line, the control, and what was found."""
    if not verdicts:
        return
    control, *others = verdicts
    if others:
        tried = [f"{shown(verdict.setting)} {describe(verdict)}" for verdict in others]
        yield f"tried   {'; '.join(tried)}"
    yield f"control {shown(control.setting)}: {describe(control)}"
    if best is not None:
        seeds = len(candidates.seeds)
        yield (
            f"found   {shown(best.setting)}: stable on {seeds} of {seeds} seeds"
            f" for {best.horizon:,} steps"
        )
    elif control.is_stable:
        yield f"found   nothing: {shown(control.setting)} is stable too"
    else:
        yield "found   nothing that is stable on all seeds and no worse than the control"


def advice(verdicts: Sequence[Verdict]) -> str:
    """Return what to do after a search that recommends nothing."""
    if verdicts and verdicts[0].is_stable:
        return f"train with {' '.join(verdicts[0].setting)}, or raise optim.lr"
    return "lower optim.lr, lengthen optim.warmup_steps, or give longer starts"


def plan_lines(config: TuneConfig, candidates: Candidates, recipe: Recipe) -> Iterator[str]:
    """Describe the search before it begins, with the cost of its first verdicts."""
    first = candidates.durations[candidates.first]
    horizon = candidates.horizons[candidates.first]
    if len(candidates.starts) > 1:
        yield f"starts  {listed(candidates.starts)}: {candidates.climb:,} steps each"
    durations = listed(candidates.durations)
    yield f"lengths {durations}: {horizon:,} steps for the first, {shown(first)}"
    yield f"seeds   {', '.join(map(str, candidates.seeds))}: stable on all of them"
    control = Probe(candidates.control, 0, candidates.horizons[0])
    own = Probe(candidates.starts[0] + first, 0, horizon)
    for what, probe in (("control", control), ("cost", own)):
        tokens = len(candidates.seeds) * tokens_of(config, probe)
        share = tokens / recipe.train.tokens
        cost = f"{human(tokens)} tokens ({100 * share:.1f} % of a run)"
        yield f"{what:<{LABEL}}{cost} for {shown(probe.setting)}, at most"


def race_command(config: TuneConfig, best: Verdict, tuned: str) -> str:
    """Return the command that compares the tuned recipe with the searched one, or with the nearest
    recipe that this one inherits from and that has no such warmup."""
    section = best.setting[-1].partition(".")[0]
    # What was searched must not be the same in both.
    searched = {section, *(text.partition("=")[0] for text in best.setting)} - {"optim"}
    options = []
    settings = []
    for text in config.settings:
        key = text.partition("=")[0]
        if searched.isdisjoint((key, key.partition(".")[0])):
            settings.append(text)
            options += ["--set", text]
    rivals = [config.recipe]
    for base in read_recipe_file(config.recipe).bases:
        rivals.append(base.stem if base.parent in recipe_folders() else str(base))
    rival = config.recipe
    for name in reversed(rivals):
        # A base need not be a whole recipe.
        with suppress(RecipeError):
            if section not in load_recipe(name, settings).methods:
                rival = name
    return shlex.join(["efftrain", "race", rival, tuned, *options])


def tuned_text(config: TuneConfig, best: Verdict) -> str:
    """Return the recipe that was found: a child of the one that was searched."""
    base = config.recipe
    if is_path(base):
        base = str(Path(base).absolute())
    draft = Draft(base, Path(base), values={"base": base})
    for text in (*config.settings, *best.setting):
        apply_override(draft, text)
    seeds = ", ".join(f"{receipt.loss:.2f}" for receipt in best.receipts)
    comment = f"{MARK}: stable for {best.horizon:,} steps on every seed, losses {seeds}.\n"
    return comment + "\n".join(toml_lines(draft.values)) + "\n"
