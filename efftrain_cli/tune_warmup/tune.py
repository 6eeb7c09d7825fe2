"""`efftrain tune-warmup`: finds a warmup by short probes instead of full runs, and shows what each
of them found and cost.

    runs/<name>/
      search.toml       the recipe being searched; search.json: the search's options
      probes/           a run directory per probe, with a probe.json once it has been seen for as
                        long as was asked
      receipts.csv      every probe: tokens, seconds, largest fluctuation, verdict, curve
      probes.png        the perplexity curves
      tuned.toml        the recipe with the warmup found; RECIPE-tuned.toml: the same, after which
                        its runs are named

`Finder` asks only for probes that have no receipt on disk, so a search that was killed goes on
where it stopped, and one that ran out of budget goes on with a larger one.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from efftrain_cli.foundation.console import (
    counted,
    human_seconds,
    make_console,
    perplexity,
    print_labelled,
    steady_output,
)
from efftrain_cli.foundation.errors import DivergedError, RecipeError, UsageError
from efftrain_cli.foundation.files import csv_text, made_beside, make_folder, write_whole
from efftrain_cli.foundation.records import read_record, sealed_toml, write_record
from efftrain_cli.plan.preview import summarize_plan
from efftrain_cli.recipe.recipe import dump_recipe, load_recipe
from efftrain_cli.run.directory import run_path, runs_in
from efftrain_cli.run.metrics import latest_rows
from efftrain_cli.run.stability import fluctuation, validation_curve
from efftrain_cli.training.session import prepare_session
from efftrain_cli.trials.runner import TrialRunner
from efftrain_cli.trials.trial import Trial
from efftrain_cli.tune_warmup import printing
from efftrain_cli.tune_warmup.grid import kind_of
from efftrain_cli.tune_warmup.printing import share_up, tokens_text
from efftrain_cli.tune_warmup.probe import Probe, Receipt, SearchFile
from efftrain_cli.tune_warmup.search import Finder, Outcome, Search

if TYPE_CHECKING:
    from rich.console import Console


def default_name(recipe_name: str, search: Search) -> str:
    """Name a search's directory, by what is tuned too if that is not the recipe's own warmup."""
    if search.tune in (None, kind_of(search.recipe)):
        return f"{recipe_name}-tune"
    return f"{recipe_name}-tune-{search.kind}"


def tune(
    search: Search,
    *,
    recipe_name: str,
    name: str | None = None,
    device: str = "auto",
    devices: int = 1,
) -> Path:
    """Run the search, or what is left of it, and return its directory.

    Raises:
        UsageError: the directory holds another search.
        StoppedError: a signal came; the same command goes on.
        DivergedError: no setting is stable; receipts and plot are written anyway.
    """
    folder = run_path(name or default_name(recipe_name, search))
    runner = TrialRunner(folder, device=device, devices=devices)
    console = make_console()
    with steady_output():
        _claim(folder, search)
        # The search must not find a warmup that pretrain would refuse: a longer one reads more
        # text.
        start = search.starts[0]
        longest = summarize_plan(search.recipe_with(start, search.durations(start)[-1]))
        session = prepare_session(search.recipe, torch.device("cpu"))
        session.train_data.check_budget(longest.windows, search.recipe.data)

        def run(probe: Probe) -> Receipt:
            printing.announce(console, search, probe, finder.receipts)
            receipt = run_probe(folder, search, probe, runner, recipe_name)
            printing.show_receipt(console, receipt)
            return receipt

        finder = Finder(search, read_receipts(folder), run)
        printing.show_plan(console, search, len(finder.receipts))
        outcome = finder.find()
    return _finish(console, folder, search, list(finder.receipts.values()), outcome, recipe_name)


def _claim(folder: Path, search: Search) -> None:
    """Make the directory of a search, or check that the existing one is of the same search. Its
    budget and seeds may change: finished probes stay valid."""
    options = SearchFile(
        schema_version=SearchFile.newest,
        tune=search.kind,
        multiples=search.multiples,
        threshold=search.threshold,
        max_share=search.max_share,
    )
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with made_beside(folder) as temporary:
            temporary.mkdir()
            write_whole(temporary / "search.toml", sealed_toml(dump_recipe(search.recipe)))
            write_record(temporary / "search.json", options)
        return
    try:
        same = read_record(folder / "search.json", SearchFile).to_json() == options.to_json()
        same = same and load_recipe(str(folder / "search.toml")) == search.recipe
    except FileNotFoundError:
        raise UsageError(f"{folder} exists but holds no search\n  give another --name") from None
    except RecipeError:
        same = False
    if not same:
        raise UsageError(
            f"{folder} holds a search with another recipe or other options"
            " (search.toml and search.json there say which)\n  give another --name, or remove it"
        )


# --- probes ---------------------------------------------------------------------------------------


def run_probe(
    folder: Path, search: Search, probe: Probe, runner: TrialRunner, recipe_name: str
) -> Receipt:
    """Train a probe, or its rest, until its verdict is clear; write and return its receipt."""
    probes = folder / "probes"
    make_folder(probes)
    recipe = probes / f"{recipe_name}.toml"
    write_whole(recipe, dump_recipe(search.recipe_of(probe)))
    trial = Trial(
        str(recipe), (), probe.seed, probe.name, until=probe.horizon, threshold=search.threshold
    )
    with runs_in(probes):
        (run,) = runner.train([trial])

    rows = latest_rows(probes / probe.name)
    if rows[-1].get("nonfinite"):
        rows.pop()  # its update was not applied
    curve = validation_curve(rows)
    if run.status == "diverged" and fluctuation(curve)[0] <= search.threshold:
        # A loss, a weight or a validation loss that is not finite is in no row.
        curve.append((rows[-1]["step"] + 1, math.inf))
    worst, at = fluctuation(curve)

    def largest(column: str) -> float | None:
        return max((row[column] for row in rows if row.get(column) is not None), default=None)

    receipt = Receipt(
        probe=probe,
        stable=worst <= search.threshold,
        max_fluctuation=worst,
        fluctuation_step=at,
        stopped_at_step=rows[-1]["step"],
        tokens=rows[-1]["tokens"],
        seconds=sum(row.get("seconds", 0.0) + row["eval_seconds"] for row in rows),
        curve=tuple(curve),
        max_grad_norm=largest("grad_norm"),
        max_adam_sqrt_v=largest("adam_sqrt_v_max"),
        max_loss_ratio=largest("loss_ratio"),
    )
    write_record(probes / probe.name / "probe.json", receipt)
    # The search may ask a survivor for more, which needs its checkpoint then.
    if not receipt.stable or probe.horizon >= search.horizon(probe.start, probe.steps):
        forget_checkpoints(probes / probe.name)
    return receipt


def forget_checkpoints(path: Path) -> None:
    """Remove the checkpoints of a probe that will not be continued."""
    shutil.rmtree(path / "checkpoints", ignore_errors=True)


def read_receipts(folder: Path) -> list[Receipt]:
    """Return the receipts of a search's probes, in the order in which they ended."""
    paths = sorted((folder / "probes").glob("*/probe.json"))
    paths.sort(key=lambda path: path.stat().st_mtime_ns)
    return [read_record(path, Receipt) for path in paths]


def receipt_row(search: Search, receipt: Receipt) -> dict[str, object]:
    """Return a probe as receipts.csv has it: `sequences` is the ramp's length if the batch size is
    warmed up, and `perplexity_by_step` the curve as `step:perplexity` pairs."""
    probe = receipt.probe
    curve = (f"{step}:{perplexity(loss):.6g}" for step, loss in receipt.curve)
    return {
        "probe": probe.name,
        "start": probe.start,
        "steps": probe.steps,
        "sequences": search.ramp(probe.start, probe.steps) or "",
        "seed": probe.seed,
        "horizon": probe.horizon,
        "verdict": receipt.verdict,
        "stopped_at_step": receipt.stopped_at_step,
        "tokens": receipt.tokens,
        "share_of_budget": f"{receipt.tokens / search.recipe.train.tokens:.6f}",
        "seconds": f"{receipt.seconds:.3f}",
        "max_fluctuation": f"{receipt.max_fluctuation:.4f}",
        "fluctuation_step": receipt.fluctuation_step,
        "max_grad_norm": _six_digits(receipt.max_grad_norm),
        "max_adam_sqrt_v": _six_digits(receipt.max_adam_sqrt_v),
        "max_loss_ratio": _six_digits(receipt.max_loss_ratio),
        "perplexity_by_step": " ".join(curve),
    }


def _six_digits(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


# --- the end of a search --------------------------------------------------------------------------


def _finish(
    console: Console,
    folder: Path,
    search: Search,
    receipts: Sequence[Receipt],
    outcome: Outcome,
    recipe_name: str,
) -> Path:
    """Write what the search found, and print what it cost.

    Raises:
        DivergedError: no setting is stable.
    """
    budget = search.recipe.train.tokens
    if receipts:
        rows = [receipt_row(search, receipt) for receipt in receipts]
        table = csv_text(list(rows[0]), [list(row.values()) for row in rows])
        write_whole(folder / "receipts.csv", table)
        printing.plot(folder / "probes.png", search, receipts)
        printing.plot_in_terminal(console, search, receipts)
        printing.show_table(console, search, rows)
        tokens = sum(receipt.tokens for receipt in receipts)
        seconds = sum(receipt.seconds for receipt in receipts)
        settings = len({(receipt.probe.start, receipt.probe.steps) for receipt in receipts})
        cost = (
            f"{counted(len(receipts), 'probe')}, {tokens_text(tokens, budget)},"
            f" {human_seconds(seconds)}"
        )
        full = (
            f"full runs of the {counted(settings, 'setting')} probed"
            f" would be {tokens_text(settings * budget, budget)}"
        )
        if tokens:  # else every probe failed in its first step
            full += (
                f", about {human_seconds(seconds / tokens * settings * budget)} at the probes' rate"
            )
        console.print()
        print_labelled(console, [f"cost       {cost}", f"           {full}"])
    print_labelled(console, [f"found      {outcome.statement}"])
    if outcome.needed is None:
        for path in (folder / "probes").glob("*"):
            forget_checkpoints(path)
    word = "tuned" if outcome.verified else "untuned"
    tuned = folder / f"{recipe_name}-{word}.toml"
    text = tuned_recipe(search, outcome, len(receipts), recipe_name)
    for path in (folder / "tuned.toml", tuned):
        write_whole(path, text)
    if outcome.start is None or outcome.steps is None:
        start = f", a longer {search.start_name}" if search.start_name else ""
        raise DivergedError(
            f"no stable setting was found; {tuned} holds {search.rule_of_thumb}, marked"
            f" as not stable, and {folder / 'receipts.csv'} the receipts\n"
            "search again under another --name with a lower optim.lr,"
            f" a longer optim.warmup_steps (--tune lr searches it){start}"
        )
    setting = "no warmup"
    if outcome.steps:
        setting = search.named(outcome.start, str(outcome.steps))
    if outcome.steps and search.kind == "batch":
        setting += f", a ramp of {search.ramp(outcome.start, outcome.steps)} sequences"
    if outcome.needed is not None:
        share = share_up(outcome.needed, budget)
        print_labelled(
            console, [f"more       the same command with {share} or more goes on from here"]
        )
    # What was tuned is part of the name if that is not the recipe's own warmup.
    other = default_name(recipe_name, search).removeprefix(f"{recipe_name}-tune")
    ends = [
        f"{word:<10} {setting}: {tuned}\n\nnext",
        f"  efftrain pretrain --recipe {tuned}"
        f" --name {recipe_name}-{word}{other}-seed{search.recipe.seed}",
    ]
    if receipts:
        curves = folder / "probes.png"
        ends.append(f"  receipts and curves: {folder / 'receipts.csv'}, {curves}")
    console.print("\n".join(ends), markup=False, soft_wrap=True)
    return folder


def tuned_recipe(search: Search, outcome: Outcome, probes: int, recipe_name: str) -> str:
    """Return the text of tuned.toml: the searched recipe with the setting to take, or the one to
    begin with where none is stable, and what is known of it."""
    if outcome.start is None or outcome.steps is None:
        start, steps = search.own
        word = f"NOT STABLE in the probes; {search.rule_of_thumb}"
    else:
        start = outcome.start
        steps = outcome.steps
        word = "NOT VERIFIED by a probe"
        if outcome.verified:
            word = "found"
    comments = {}
    if steps:
        comments[search.duration_name] = word
    if steps and search.kind == "batch":
        comments[search.duration_name] = f"{word}: {steps} steps"
    if steps and search.start_name:
        comments[search.start_name] = word
    return (
        f"# {recipe_name} after `efftrain tune-warmup` with {probes} probes"
        f" (threshold {search.threshold:g}, {search.multiples} learning-rate warmups).\n"
        "#"
        f" {outcome.statement}\n" + dump_recipe(search.recipe_with(start, steps), comments)
    )
