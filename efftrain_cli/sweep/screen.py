"""What a sweep prints: its runs, what is left to do of each, and the settings that were tried."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from efftrain_cli.compare import formats
from efftrain_cli.compare.show import output_console
from efftrain_cli.compare.tables import Table, human
from efftrain_cli.sweep.trials import Choice, Trial


def print_trials(trials: Sequence[tuple[Trial, str, int]]) -> None:
    """Prints the runs of a sweep, what is left to do of each, and the tokens that takes at most."""
    rows = tuple(
        (trial.name, trial.recipe, " ".join(trial.settings) or "-", str(trial.seed), state, human(tokens))
        for trial, state, tokens in trials
    )
    formats.print_tables(
        output_console(), [Table("Runs of this sweep, in order", ("run", "recipe", "settings", "seed", "state", "tokens"), rows)]
    )
    left = [tokens for _, state, tokens in trials if state in ("new", "unfinished")]
    print(f"{len(left)} of {len(trials)} runs to train, at most {human(sum(left))} tokens")


def print_choices(choices: Sequence[Choice]) -> None:
    """Prints every setting that was tried, and which one each recipe is compared with. Goes to stderr, beside the data."""
    from rich.console import Console

    rows = []
    for choice in choices:
        there = [loss for loss in choice.losses if loss is not None]
        missing = len(choice.losses) - len(there)
        mean = f"{sum(there) / len(there):.4f}" if there and not missing else f"{missing} of {len(choice.losses)} not finished"
        each = ", ".join("-" if loss is None else f"{loss:.4f}" for loss in choice.losses)
        rows.append((choice.recipe, " ".join(choice.settings), mean, each, "compared" if choice.best else ""))
    note = (
        "Each recipe is compared at its own best setting, chosen on these same runs: both look a little better than on new seeds."
    )
    console = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 10_000)
    table = Table("Settings tried", ("recipe", "setting", "mean final loss", "by seed", ""), tuple(rows), note)
    formats.print_tables(console, [table])
