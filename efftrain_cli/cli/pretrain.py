"""`efftrain pretrain`."""

from __future__ import annotations

from typing import Annotated, Literal

from typer import Option

from efftrain_cli.cli.app import app
from efftrain_cli.cli.complete import run_names
from efftrain_cli.cli.options import (
    Device,
    Devices,
    Overrides,
    Quiet,
    RecipeArgument,
    RecipeOption,
    Seed,
    VerifyData,
    chosen_recipe,
    share,
)
from efftrain_cli.foundation.console import say
from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.training.launch import should_log


@app.command(
    rich_help_panel="Start here",
    examples=(
        "efftrain pretrain small",
        "efftrain pretrain small --set data.train=my.txt --seed 1",
        "efftrain pretrain small-slw --plan",
        "efftrain pretrain gpt2-117m --plan --assume 'H100 x 8 at 40%'",
        "efftrain pretrain --resume small-seed1234",
        "efftrain pretrain --resume small-seed1234 --set train.tokens=4M",
        "efftrain pretrain --from small-seed1234@400 --set train.tokens=4M",
    ),
)
def pretrain(
    recipe_argument: RecipeArgument = None,
    recipe_option: RecipeOption = None,
    set_: Overrides = None,
    name: Annotated[str | None, Option(help="Run name, by default RECIPE-seedSEED.")] = None,
    seed: Seed = None,
    device: Device = "auto",
    devices: Devices = 1,
    steps: Annotated[
        int | None, Option(min=0, help="Train up to this step; --resume continues from there.")
    ] = None,
    resume: Annotated[
        str | None, Option(help="Continue this run where it stopped.", autocompletion=run_names)
    ] = None,
    from_: Annotated[
        str | None,
        Option(
            "--from",
            metavar="RUN@STEP",
            help="Begin with the state of this checkpoint, by its run's recipe or another.",
        ),
    ] = None,
    override_resume: Annotated[
        bool,
        Option(
            "--override-resume",
            help="With --resume: continue even if the recipe or the data have changed.",
        ),
    ] = False,
    from_start: Annotated[
        bool,
        Option(
            "--from-start",
            help="With --resume: begin again at step 1 if the run has no checkpoint.",
        ),
    ] = False,
    plan: Annotated[
        bool, Option("--plan", help="Print what it costs, in six lines; train nothing.")
    ] = False,
    assume: Annotated[
        str | None,
        Option(help='With --plan: the devices to plan for, such as "H100 x 8 at 40%".'),
    ] = None,
    format_: Annotated[
        Literal["table", "csv", "json"] | None,
        Option(
            "--format",
            help="With --plan: the costs as lines or JSON, or every step as CSV.",
            show_default="table",
        ),
    ] = None,
    wandb: Annotated[
        str | None, Option(help="off, offline or online: send the metrics to wandb too.")
    ] = None,
    tensorboard: Annotated[
        bool,
        Option(
            "--tensorboard",
            help="Write the metrics for TensorBoard too; needs the extra `tensorboard`.",
        ),
    ] = False,
    verify_data: VerifyData = "lazy",
    quiet: Quiet = False,
    no_probe: Annotated[
        bool, Option("--no-probe", help="Skip the memory check and time estimate before step 1.")
    ] = False,
) -> None:
    """Train a GPT from a recipe; metrics and checkpoints go to runs/NAME.

    --resume RUN --set train.tokens=N trains a run longer: its learning-rate
    schedule ends where it was meant to, and the rate stays at optim.min_lr
    after that.
    """
    if format_ is not None and not plan:
        raise UsageError(
            f"--format {format_} only applies to a printed plan\n"
            "  add --plan, or leave --format out"
        )
    if plan and devices > 1:
        raise UsageError(
            "--plan is not of the devices here\n"
            f'  name them instead of --devices: --assume "H100 x {devices} at 40%"'
        )
    if assume is not None and not (plan and format_ != "csv"):
        raise UsageError(
            "--assume plans for devices that are not here\n  add --plan, and no --format csv"
        )
    overrides = list(set_ or [])
    if wandb is not None:
        overrides.append(f"wandb.mode={wandb}")
    if tensorboard:
        overrides.append("wandb.tensorboard=true")
    if resume is not None:
        given = {
            "--recipe": recipe_argument or recipe_option,
            "--name": name,
            "--seed": seed,
            "--plan": plan or None,
            "--from": from_,
        }
        if forbidden := [option for option, value in given.items() if value is not None]:
            raise UsageError(
                f"--resume {resume} continues the run with its own recipe\n"
                f"  leave out {', '.join(forbidden)}"
            )
        from efftrain_cli.run.lock import take_lock
        from efftrain_cli.run.names import find_run

        run = find_run(resume)
        # Whether another process owns it is said before PyTorch is imported, which takes seconds.
        if should_log():
            take_lock(run / "lock").close()
        share(device, devices)
        from efftrain_cli.pretrain import resume as resume_run

        resume_run(
            run.name,
            device=device,
            steps=steps,
            with_probe=not no_probe,
            verify_data=verify_data,
            overrides=overrides,
            override=override_resume,
            from_start=from_start,
        )
        return
    for option, given_alone in (
        ("--override-resume", override_resume),
        ("--from-start", from_start),
    ):
        if given_alone:
            raise UsageError(
                f"{option} only works with --resume\n  add --resume RUN, or leave it out"
            )
    from efftrain_cli.recipe import draft
    from efftrain_cli.recipe.recipe import load_recipe
    from efftrain_cli.recipe.rules import warnings_of
    from efftrain_cli.run.directory import checkpoint_step, run_path, taken
    from efftrain_cli.run.names import find_branch_point, recipe_name
    from efftrain_cli.run.origin import check_text_is_named, read_origin

    checkpoint = None
    words = []
    owner = ""
    if from_ is not None:
        checkpoint = find_branch_point(from_)
        words = [f"at{checkpoint_step(checkpoint)}"]
    if checkpoint is not None and recipe_argument is None and recipe_option is None:
        parent = checkpoint.parent.parent
        check_text_is_named(parent, overrides, f"--from {from_}")
        recipe = str(parent / "recipe.toml")
        owner = recipe_name(read_origin(parent), parent.name)
    else:
        recipe = chosen_recipe(recipe_argument, recipe_option)
    if recipe in run_names(recipe) and recipe not in draft.recipe_names():
        raise UsageError(
            f"{recipe} is a run, not a recipe\n"
            f"  continue it with --resume {recipe},"
            f" or begin another with its recipe, {run_path(recipe) / 'recipe.toml'}"
        )
    if seed is not None:
        overrides.append(f"seed={seed}")
    loaded = load_recipe(recipe, overrides)
    if should_log():
        for warning in warnings_of(loaded):
            say(f"warning: {warning}")
    if plan:
        from efftrain_cli.cli.plan_output import print_csv, print_plan
        from efftrain_cli.foundation.step import Progress
        from efftrain_cli.plan.devices import assumed_device, device_here

        begun = Progress()
        if checkpoint is not None:
            # Checkpoints are read by PyTorch, whose import takes seconds.
            from efftrain_cli.training.branch import Branch

            branch = Branch(checkpoint, loaded)
            branch.check()
            begun = branch.progress
        if format_ == "csv":
            print_csv(loaded, steps, begun)
            return
        planned = device_here(device) if assume is None else assumed_device(assume)
        print_plan(loaded, recipe, steps, format_ or "table", planned, device, begun)
        return
    owner = owner or draft.recipe_name(recipe)
    name = name or "-".join([owner, *words, f"seed{loaded.seed}"])
    if run_path(name).exists():
        raise taken(name)
    share(device, devices)
    from efftrain_cli.pretrain import start
    from efftrain_cli.training.branch import Branch

    start(
        loaded,
        recipe_name=owner,
        name=name,
        device=device,
        steps=steps,
        with_probe=not no_probe,
        verify_data=verify_data,
        branch=Branch(checkpoint, loaded) if checkpoint is not None else None,
    )
