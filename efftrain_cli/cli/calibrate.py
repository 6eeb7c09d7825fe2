"""`efftrain calibrate`."""

from __future__ import annotations

from typing import Annotated

from typer import Argument

from efftrain_cli.cli.app import app
from efftrain_cli.cli.complete import run_or_recipe_names
from efftrain_cli.cli.options import Device, Quiet


@app.command(
    rich_help_panel="Compare",
    examples=(
        "efftrain calibrate small small-slw",
        "efftrain calibrate 'small*' --device cuda",
    ),
)
def calibrate(
    runs: Annotated[
        list[str],
        Argument(
            help="Finished runs of two or more recipes, globs over runs, or recipes:"
            " all their seeds.",
            metavar="RUN",
            autocompletion=run_or_recipe_names,
        ),
    ],
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Time steps of trained recipes side by side, so that compare can judge training seconds.

    It takes 2 % of their training time, or three blocks of steps if these take longer, on their
    machine. sweep does it after 100 seconds of training or more, study if a measure is about
    seconds.
    """
    from efftrain_cli.run.names import select_runs

    paths = {path.name: path for path in select_runs(runs)}
    # PyTorch's import takes seconds: a mistyped name is answered before it.
    from efftrain_cli import calibrate as command
    from efftrain_cli.compare.calibrated import describe_seconds, with_calibration
    from efftrain_cli.compare.comparison import read_valid_runs
    from efftrain_cli.compare.groups import finished_runs, group_runs, runs_of
    from efftrain_cli.foundation.console import counted, human_seconds, print_folded, say
    from efftrain_cli.run.calibrations import write_calibration
    from efftrain_cli.training.session import choose_device

    read, left_out = read_valid_runs(list(paths.values()))
    for fault in left_out:
        say(f"warning: a run is left out: {fault}")
    groups = group_runs(finished_runs(read), allow=True)
    chosen = choose_device(device)
    command.check_machine(groups, chosen)
    arms = command.choose_arms(groups, paths)
    spent = sum(run.seconds for run in runs_of(groups))
    plan = command.design(arms, spent)
    if not quiet:
        steps = sum(map(len, plan.steps))
        say(
            f"timing     {counted(steps, 'step')} of {counted(len(arms), 'recipe')} in"
            f" {counted(plan.blocks, 'block')}, about {human_seconds(plan.seconds)}:"
            f" {100 * plan.seconds / spent:.1f} % of the runs' training"
        )
    calibration = command.measure(arms, plan, chosen)
    file = write_calibration(calibration)
    base, *others = with_calibration(groups, [calibration])
    lines = [describe_seconds(base, group) for group in others]
    print_folded("\n".join([*filter(None, lines), f"saved      {file}"]))
