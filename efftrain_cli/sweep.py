"""`efftrain sweep`: plan, train, and show what the grid says beside the comparison."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from efftrain_cli.compare.picture import draw_in_terminal, write_figures
from efftrain_cli.plan.cost import disk_bytes
from efftrain_cli.run.directory import runs_root
from efftrain_cli.run.rates import seconds_left
from efftrain_cli.trials import screen
from efftrain_cli.trials.array import ArrayWriter
from efftrain_cli.trials.curves import gains_of, ladders, sensitivity_curves, without
from efftrain_cli.trials.pictures import rates_plot
from efftrain_cli.trials.runner import TrialRunner, free_runs, tokens_so_far
from efftrain_cli.trials.trial import ENDED, Trial, choose, read_trial, recipe_of, state_of


def print_plan(trials: Sequence[Trial], jobs: int, as_json: bool) -> None:
    """Print the runs, and what is left to do of each."""
    runs: list[dict[str, Any]] = []
    for trial in trials:
        recipe, state = recipe_of(trial), state_of(trial)
        left = 0 if state in ENDED else max(0, recipe.train.tokens - tokens_so_far(trial.name))
        run = {
            "run": trial.name,
            "recipe": trial.recipe,
            "settings": trial.settings,
            "seed": trial.seed,
            "state": state,
        }
        needs = {
            "seconds_left": seconds_left(recipe, left),
            "disk_bytes": disk_bytes(recipe),
        }
        runs.append({**run, "tokens_left": left, **needs})
    if as_json:
        print(json.dumps({"schema_version": 1, "runs": runs}, indent=1))
    else:
        print("\n".join(screen.plan_lines(runs, jobs)))


def train(
    trials: Sequence[Trial],
    device: str,
    jobs: int,
    name: str | None,
    take_over: str | None,
    devices: int = 1,
    array: bool = False,
) -> bool:
    """Train what is not trained yet, or write the job array that does; return whether all runs have ended."""
    folder = runs_root() / f"{name or 'sweep'}-logs"
    runner = (ArrayWriter if array else TrialRunner)(
        folder=folder, device=device, jobs=jobs, devices=devices
    )
    if take_over is not None:
        free_runs(trials, take_over)
    return set(runner.train(trials)) <= set(ENDED)


def grid_lines(
    trials: Sequence[Trial], recipes: int, baseline: str | None, plot: bool, figures: Path | None
) -> list[str]:
    """Format what the grid shows: losses over learning rates, gains over budgets, else the settings that were tried."""
    lines: list[str] = []
    curves = sensitivity_curves(
        [(without(trial, ("optim.lr",)), trial) for trial in trials], read_trial
    )
    if curves:
        lines += [*screen.curve_lines(curves), *screen.curve_warnings(curves)]
        if plot:
            lines += ["", draw_in_terminal(rates_plot(curves), 80)]
        if figures is not None:
            lines += [f"figure: {path}" for path in write_figures([rates_plot(curves)], figures)]
        lines.append("")
    found = ladders(
        [(without(trial, ("train.tokens", "optim.lr")), trial) for trial in trials], read_trial
    )
    if len(found) > 1:
        base = next((ladder for ladder in found if ladder.label == baseline), found[0])
        for ladder in found:
            if problem := ladder.problem or base.problem:
                lines.append(f"{ladder.label}: no speed-up at matched loss: {problem}")
            elif ladder is not base:
                lines += screen.gain_lines(ladder.label, base.label, gains_of(base, ladder))
        lines.append("")
    choices = choose(trials)
    if len(choices) > recipes and not curves and not found:
        lines += [*screen.choice_lines(choices), ""]
    return lines
