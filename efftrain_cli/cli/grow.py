"""`efftrain grow`."""

from __future__ import annotations

from typing import Annotated, Literal

from typer import Argument, Option

from efftrain_cli.cli.app import app
from efftrain_cli.cli.complete import run_names
from efftrain_cli.cli.options import CheckpointOption, Device, Overrides, checked_loss
from efftrain_cli.foundation.errors import UsageError

PLAN = "With --plan"
Batch = Literal["fixed", "varying"]


@app.command(
    rich_help_panel="Train",
    examples=(
        "efftrain grow small-seed1234 --operator depth --set train.tokens=2M",
        "efftrain grow --plan --target-size 85M --stages 3",
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
    target_loss: Annotated[
        float | None,
        Option(
            callback=checked_loss,
            help="Loss to plan for by the scaling law, nats per token.",
            rich_help_panel=PLAN,
        ),
    ] = None,
    target_size: Annotated[
        str | None,
        Option(help="Size to plan for, parameters without embeddings: 85M.", rich_help_panel=PLAN),
    ] = None,
    fit: Annotated[
        list[str] | None,
        Option(
            help="Fit the scaling law to this run from scratch."
            " Repeatable; two sizes or more. Without it, Kaplan et al.'s constants.",
            rich_help_panel=PLAN,
            autocompletion=run_names,
            show_default=False,
        ),
    ] = None,
    stages: Annotated[int, Option(min=1, max=8, help="Stages to plan.", rich_help_panel=PLAN)] = 2,
    batch: Annotated[
        Batch, Option(help="One batch size, or each stage's own.", rich_help_panel=PLAN)
    ] = "fixed",
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
    threshold: Annotated[
        float | None,
        Option(
            help="Slope d log L / d log C at which to grow.",
            show_default="the paper's",
            rich_help_panel=PLAN,
        ),
    ] = None,
    window: Annotated[
        int, Option(min=3, help="Evaluations that one slope is fitted to.", rich_help_panel=PLAN)
    ] = 31,
) -> None:
    """Grow a run's model, with its optimizer state, into a new run; or plan when to (--plan).

    How: --set staged_growth.symmetry, .depth and .moments. The new stage: --set stages.1.lr,
    .rewarmup_steps and .schedule_ratio, or stages.2 if RUN was grown before.
    """
    from efftrain_cli.methods.staged_growth import parse_operator

    try:
        operators = [parse_operator(text) for text in operator or []]
    except ValueError as error:
        raise UsageError(f"--operator {error}") from None
    if plan:
        if run is not None:
            raise UsageError(
                f"--plan grows nothing\n  leave out {run!r}, or give it as --small {run}"
            )
        if small is not None:
            from efftrain_cli.foundation.console import print_folded
            from efftrain_cli.grow.plan_report import curve_lines, curve_of, threshold_of

            if threshold is None:
                threshold = threshold_of(operators)
            # An odd window has a middle.
            window |= 1
            target_curve = None
            if target is not None:
                target_curve = curve_of(target, window)
            small_curve = curve_of(small, window)
            print_folded("\n".join(curve_lines(small_curve, target_curve, threshold)), indent=0)
        elif target is not None:
            raise UsageError("--target needs the curve of the small model too\n  add --small RUN")
        else:
            _plan_by_law(target_loss, target_size, fit or [], stages, batch)
        return
    if run is None:
        raise UsageError(
            "no run to grow\n  name one (`efftrain runs list` shows all), or give --plan"
        )
    from efftrain_cli.run.names import find_run

    run = find_run(run).name  # before PyTorch is imported, which takes seconds
    if not operator:
        raise UsageError(
            "no operator to grow with\n"
            "  give --operator width, --operator depth, or both; --operator width:3 for x 3"
        )
    from efftrain_cli.foundation.console import make_console, print_labelled, say
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
    *lines, command = growth_lines(grown, weights_only)
    print_labelled(make_console(result=True), lines, indent=12)
    print(command)


def _plan_by_law(
    target_loss: float | None, target_size: str | None, fit: list[str], stages: int, batch: Batch
) -> None:
    from efftrain_cli.foundation.console import print_folded
    from efftrain_cli.foundation.section import parse_count
    from efftrain_cli.grow.plan_report import law_of, schedule_lines
    from efftrain_cli.grow.scaling_law import KAPLAN, plan_schedule

    size = None
    if target_size is not None:
        try:
            size = float(parse_count(target_size))
        except ValueError as error:
            raise UsageError(f"--target-size: {error}") from None
        if not size:
            raise UsageError("--target-size 0 is no model\n  give its parameters, such as 85M")
    if fit and batch == "varying":
        raise UsageError(
            "--batch varying needs the critical batch, which runs of one batch size do not show\n"
            "  leave out --batch or --fit"
        )
    law = KAPLAN
    fitted = None
    if fit:
        fitted = law_of(fit)
        law = fitted.law
    planned = plan_schedule(law, stages, target_loss=target_loss, target_size=size, batch=batch)
    print_folded("\n".join(schedule_lines(law, planned, batch, fitted)), indent=0)
