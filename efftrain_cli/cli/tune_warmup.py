"""`efftrain tune-warmup`."""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated, Literal

from typer import Option

from efftrain_cli.cli.app import app
from efftrain_cli.cli.complete import recipe_names
from efftrain_cli.cli.options import Device, Devices, Overrides, Seed
from efftrain_cli.foundation.errors import UsageError

Tuned = Literal["length", "batch", "two-stage", "lr"]


@app.command(
    "tune-warmup",
    rich_help_panel="Train",
    examples=(
        "efftrain tune-warmup --recipe unstable-slw --plan",
        "efftrain tune-warmup --recipe unstable-slw",
        "efftrain tune-warmup --recipe gpt2-117m-slw --budget 10% --plan",
        "efftrain tune-warmup --recipe unstable --tune lr --seeds 0..2",
    ),
)
def tune_warmup(
    recipe: Annotated[
        str,
        Option(
            help="Recipe name or path. Tunes its sequence length or batch size warmup;"
            " if it has neither, a sequence length warmup.",
            autocompletion=recipe_names,
        ),
    ],
    set_: Overrides = None,
    tune: Annotated[
        Tuned | None,
        Option(
            metavar="length|batch|two-stage|lr",
            help="What to tune: a warmup of lengths,"
            " a batch ramp, the switch between two stages, or the learning-rate warmup's length.",
            show_default="the recipe's",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        Option(
            help="Most that all probes together may train:"
            " 10% of a full run, or tokens such as 500M.",
            show_default="no limit",
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        Option(
            help="Probe every setting with these seeds, 0..2 or 0,3; the majority decides.",
            show_default="the recipe's",
        ),
    ] = None,
    name: Annotated[
        str | None, Option(help="Name of the search's directory in runs/; default RECIPE-tune.")
    ] = None,
    seed: Seed = None,
    device: Device = "auto",
    devices: Devices = 1,
    multiples: Annotated[
        int, Option(help="How long each duration is observed, in learning-rate warmups.")
    ] = 3,
    threshold: Annotated[
        float, Option(help="Unstable: validation perplexity above this many times its best so far.")
    ] = 1.3,
    max_share: Annotated[
        float, Option(help="Share of the token budget that the longest warmup tried may take.")
    ] = 0.66,
    plan: Annotated[
        bool, Option("--plan", help="Print the search and what it can cost; train nothing.")
    ] = False,
    format_: Annotated[
        Literal["text", "json"] | None,
        Option(
            "--format", help="With --plan: text, or json for other programs.", show_default="text"
        ),
    ] = None,
    quiet: Annotated[
        bool,
        Option(
            "--quiet",
            "-q",
            help="Print nothing but warnings and errors; the verdict is saved in the run.",
        ),
    ] = False,
) -> None:
    """Find a warmup by short probes: the shortest stable start, then the longest stable duration.

    --tune tunes another warmup by the same rule and budget. To continue a search that
    was stopped or killed, give the same command again; if it ran out of budget,
    give a larger one.
    """
    from efftrain_cli.recipe.recipe import load_recipe
    from efftrain_cli.trials.trial import parse_seeds
    from efftrain_cli.tune_warmup.search import Search

    overrides = list(set_ or [])
    if seed is not None:
        overrides.append(f"seed={seed}")
    if seed is not None and seeds is not None:
        raise UsageError("--seed and --seeds exclude each other\n  give only --seeds")
    loaded = load_recipe(recipe, overrides)
    search = Search(
        recipe=loaded,
        tune=tune,
        budget=None if budget is None else parse_budget(budget, loaded.train.tokens),
        seeds=() if seeds is None else parse_seeds(seeds),
        multiples=multiples,
        threshold=threshold,
        max_share=max_share,
    )
    if format_ is not None and not plan:
        raise UsageError(
            f"--format {format_} only applies to a printed plan\n"
            "  add --plan, or leave --format out"
        )
    if format_ == "json":
        from efftrain_cli.foundation.console import print_json
        from efftrain_cli.tune_warmup.printing import plan_values

        print_json(plan_values(search))
        return
    if plan:
        from efftrain_cli.foundation.console import make_console
        from efftrain_cli.tune_warmup.printing import show_plan

        show_plan(make_console(), search)
        return
    if quiet:
        from efftrain_cli.foundation.console import silence

        silence()
    from efftrain_cli.tune_warmup.tune import tune as run_search

    run_search(
        search,
        recipe_name=PurePath(recipe).name.removesuffix(".toml"),
        name=name,
        device=device,
        devices=devices,
    )


def parse_budget(text: str, tokens: int) -> int:
    """Return the tokens in "10%" of a run of `tokens`, or in a count such as "500M".

    Raises:
        UsageError: it is neither.
    """
    from efftrain_cli.foundation.section import parse_count

    try:
        if text.strip().endswith("%"):
            share = float(text.strip()[:-1]) / 100
            if 0 < share <= 100:
                return int(share * tokens)
        elif isinstance(count := parse_count(text), int) and count > 0:
            return count
    except ValueError:
        pass
    raise UsageError(
        f"--budget {text!r} is no number of tokens\n"
        "  give a share of a full run, such as 10%, or tokens, such as 500M"
    )
