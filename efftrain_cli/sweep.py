"""`efftrain sweep`: plan, train, and show what the grid says beside the comparison."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from efftrain_cli.compare.comparison import Comparison, compare, read_valid_runs
from efftrain_cli.compare.groups import Group, best_settings, group_runs, rank_of, runs_of
from efftrain_cli.compare.picture import draw_in_terminal, write_figures
from efftrain_cli.compare.sisters import count_sisters
from efftrain_cli.foundation.console import print_json
from efftrain_cli.run.directory import runs_root
from efftrain_cli.trials import screen
from efftrain_cli.trials.array import ArrayWriter
from efftrain_cli.trials.costs import needs_of
from efftrain_cli.trials.curves import gains_of, ladders, name_trials, sensitivity_curves
from efftrain_cli.trials.pictures import rates_plot
from efftrain_cli.trials.runner import TrialRunner, free_runs
from efftrain_cli.trials.trial import ENDED, Trial, state_of


def print_plan(trials: Sequence[Trial], jobs: int, as_json: bool) -> None:
    """Print the runs, and what is left to do of each."""
    runs: list[dict[str, Any]] = []
    for trial in trials:
        state = state_of(trial)
        run = {
            "run": trial.name,
            "recipe": trial.recipe,
            "settings": trial.settings,
            "seed": trial.seed,
            "state": state,
        }
        runs.append(run | needs_of(trial, state))
    if as_json:
        print_json({"schema_version": 1, "runs": runs})
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
    """Train what is not trained yet, or write the job array that does; return whether all runs have
    ended."""
    folder = runs_root() / f"{name or 'sweep'}-logs"
    runner = (ArrayWriter if array else TrialRunner)(
        folder=folder, device=device, jobs=jobs, devices=devices
    )
    if take_over is not None:
        free_runs(trials, take_over)
    return set(runner.train(trials)) <= set(ENDED)


def compare_trials(
    trials: Sequence[Trial],
    baseline: str | None,
    target_loss: float | None,
    allow: bool,
) -> Comparison:
    """Compare a sweep's runs, each recipe at its own best setting."""
    paths = [runs_root() / trial.name for trial in trials]
    runs, left_out = read_valid_runs(paths)
    groups, _ = best_settings(group_runs(runs, allow))
    if len({group.recipe_name for group in groups}) == 1:
        # `compare` would show every setting of one recipe.
        best: dict[float, Group] = {}
        for group in sorted(groups, key=rank_of):
            best.setdefault(group.budget, group)
        groups = list(best.values())
        runs = runs_of(groups)
    return compare(
        runs,
        baseline=baseline,
        target_loss=target_loss,
        allow=allow,
        left_out=left_out,
        sisters=count_sisters(paths),
    )


def grid_lines(
    trials: Sequence[Trial], baseline: str, plot: bool, figures: Path | None
) -> list[str]:
    """Format what the grid shows: losses over learning rates, and gains over budgets against recipe
    `baseline`."""
    lines: list[str] = []
    curves = sensitivity_curves(name_trials(trials, ("optim.lr",)))
    if curves:
        lines += [*screen.curve_lines(curves), *screen.curve_warnings(curves)]
        if plot:
            lines += ["", draw_in_terminal(rates_plot(curves), 80)]
        if figures is not None:
            lines += [f"figure: {path}" for path in write_figures([rates_plot(curves)], figures)]
        lines.append("")
    found = ladders(name_trials(trials, ("train.tokens", "optim.lr")))
    if len(found) > 1:
        named = (ladder for ladder in found if ladder.label.split()[0] == baseline)
        base = next(named, found[0])
        for ladder in found:
            if problem := ladder.problem or base.problem:
                lines.append(f"{ladder.label}: no speed-up at matched loss: {problem}")
            elif ladder is not base:
                lines += screen.gain_lines(ladder.label, base.label, gains_of(base, ladder))
        lines.append("")
    return lines
