"""`efftrain grow`."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from efftrain_cli.cli.app import app
from efftrain_cli.cli.complete import run_names
from efftrain_cli.cli.options import CheckpointOption, Device, Overrides
from efftrain_cli.foundation.errors import UsageError

PLAN = "With --plan"


@app.command(
    rich_help_panel="Train",
    examples=(
        "efftrain grow small-seed1234 --operator depth --set train.tokens=2M",
        "efftrain grow --plan --small shallow --target small-seed1234 --operator depth",
    ),
)
def grow(
    run: Annotated[
        str | None,
        Argument(
            metavar="RUN",
            help="Run to grow; it is not changed.",
            autocompletion=run_names,
            show_default=False,
        ),
    ] = None,
    operator: Annotated[
        list[str] | None,
        Option(
            help="width or depth (x 2), with a factor, width:3,"
            " or to a size, pad:192 (n_embd), d_ff:512, n_kv_head:4. Repeatable, in order.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        str | None, Option(help="Name of the new run.", show_default="RUN-grown")
    ] = None,
    weights_only: Annotated[
        bool,
        Option("--weights-only", help="Grow only the weights, if the optimizer's state is lost."),
    ] = False,
    checkpoint: CheckpointOption = None,
    set_: Overrides = None,
    device: Device = "auto",
    plan: Annotated[bool, Option("--plan", help="Grow nothing; plan when to grow.")] = False,
    small: Annotated[
        str | None,
        Option(
            help="Run of the small model, from scratch.",
            rich_help_panel=PLAN,
            autocompletion=run_names,
        ),
    ] = None,
    target: Annotated[
        str | None,
        Option(
            help="Run of the target's size, from scratch.",
            rich_help_panel=PLAN,
            autocompletion=run_names,
        ),
    ] = None,
) -> None:
    """Grow a run's model, with its optimizer state, into a new run; or plan when to (--plan).

    How: --set staged_growth.symmetry, .depth and .moments. The new stage: --set stages.1.lr,
    .rewarmup_steps and .schedule_ratio, or stages.2 if RUN was grown before.
    """
    from efftrain_cli.methods.stages import parse_operator
    from efftrain_cli.run.names import find_run

    try:
        operators = [parse_operator(text) for text in operator or []]
    except ValueError as error:
        raise UsageError(f"--operator {error}") from None
    if plan:
        if run is not None:
            raise UsageError(
                f"--plan grows nothing\n  leave out {run!r}, or give it as --small {run}"
            )
        if small is None:
            raise UsageError(
                "--plan needs the curve of a small model, trained from scratch\n  add --small RUN"
            )
        from efftrain_cli.foundation.console import print_folded
        from efftrain_cli.grow.plan_report import plan_lines, read_curve, threshold_of

        threshold = threshold_of(operators)
        small_curve = read_curve(small)
        target_curve = None
        if target is not None:
            target_curve = read_curve(target)
        lines = plan_lines(small_curve, target_curve, threshold)
        print_folded("\n".join(lines), indent=0)
        return
    if run is None:
        raise UsageError(
            "no run to grow\n  name one (`efftrain runs list` shows all), or give --plan"
        )
    run = find_run(run).name  # before PyTorch is imported, which takes seconds
    if not operator:
        raise UsageError(
            "no operator to grow with\n"
            "  give --operator width, --operator depth, or both; --operator width:3 for x 3"
        )
    from efftrain_cli.foundation.console import print_folded, say
    from efftrain_cli.grow.grow import grow_run
    from efftrain_cli.grow.plan_report import growth_lines
    from efftrain_cli.recipe.rules import warnings_of
    from efftrain_cli.training.session import choose_device

    grown = grow_run(
        run,
        operator,
        name,
        choose_device(device),
        weights_only=weights_only,
        checkpoint=checkpoint,
        overrides=tuple(set_ or ()),
    )
    if grown.budget_left:
        for warning in warnings_of(grown.recipe):
            say(f"warning: {warning}")
    *report, command = growth_lines(grown, weights_only)
    print_folded("\n".join(report), indent=12)
    print(command)
