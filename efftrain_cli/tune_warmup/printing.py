"""What `efftrain tune-warmup` shows: the search before it begins, each probe, and their curves. No
torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from efftrain_cli.foundation.console import (
    counted,
    human_count,
    human_seconds,
    print_labelled,
    table_lines,
)
from efftrain_cli.tune_warmup.probe import Probe, Receipt
from efftrain_cli.tune_warmup.search import Search

if TYPE_CHECKING:
    from rich.console import Console

    from efftrain_cli.compare.picture import Plot


def plan_values(search: Search) -> dict[str, Any]:
    """Return what `show_plan` prints as plain values. Durations and horizons in steps, costs in
    tokens."""
    start = search.starts[0]
    return {
        "tunes": search.kind,
        "searches": [name for name in (search.start_name, search.duration_name) if name],
        "own": list(search.own),
        "starts": list(search.starts),
        "durations": list(search.durations(start)),
        "window_steps": search.lr_warmup_steps,
        "horizon_steps": search.horizon(start, search.nearest_duration(start)),
        "threshold": search.threshold,
        "seeds": list(search.all_seeds),
        "budget": search.budget,
        "smallest_budget": search.smallest_budget(),
        "cost": {"worst": {"probes": sum(search.most_probes()), "tokens": search.most_tokens()}},
    }


def show_plan(console: Console, search: Search, finished: int = 0) -> None:
    """Print which probes the search may ask for, and their cost at most; `finished` of them have
    receipts."""
    budget = search.recipe.train.tokens
    start = search.starts[0]
    durations = search.durations(start)
    nearest = search.nearest_duration(start)
    horizon = search.horizon(start, nearest)
    every = search.recipe_of(Probe(start=start, steps=nearest, seed=0, horizon=1)).eval.every
    interval = "step"
    if every > 1:
        interval = f"{every} steps"
    unit = "tokens"
    length = search.duration_name
    if search.kind == "batch":
        unit = "sequences per step"
        length = f"the length of the ramp ({length})"
    starts = within = seeds = ""
    if search.start_name:
        starts = f"{search.start_name} from {start} to {search.starts[-1]} {unit}, then "
        within = f"{search.lr_warmup_steps:,} steps for the start, "
    if len(search.all_seeds) > 1:
        seeds = f"; each with seeds {', '.join(map(str, search.all_seeds))}, by the majority"
    own = search.named(start, f"{nearest:,}")
    beyond = {"lr": " for its own steps and", "two-stage": " up to the switch and"}.get(
        search.kind, ""
    )
    smallest = search.smallest_budget()
    of_starts, of_durations = search.most_probes()
    lines = [
        f"searched   {starts}{length} from {durations[0]:,} to {durations[-1]:,} steps,"
        f" each about 1.4 times its neighbour; first {own}",
        (
            f"probes     {within}{horizon:,}"
            f" for {nearest:,} steps:{beyond} {search.multiples - bool(beyond)} learning-rate"
            f" warmups (--multiples {search.multiples}){seeds}."
            " A probe that is asked for more goes on from where it stands"
        ),
        f"unstable   validation perplexity above {search.threshold:g} times its best so far"
        f" (--threshold), validated every {interval}; the probe ends at once",
        f"cost       {tokens_text(smallest, budget)} to verify {own}",
        f"           at most {of_starts + of_durations} probes,"
        f" {tokens_text(search.most_tokens(), budget)}:"
        f" {of_starts} for the start and {of_durations} for the duration,"
        " each costing as much as the costliest. Validation is not counted",
    ]
    if search.budget is None:
        lines.append(
            "budget     none (--budget 10%);"
            f" the smallest sensible one is {share_up(smallest, budget)}"
        )
    elif search.budget < smallest:
        lines.append(
            f"budget     {tokens_text(search.budget, budget)}: too little to verify {own}; "
            f"the smallest sensible budget is {share_up(smallest, budget)}"
        )
    else:
        lines.append(
            f"budget     {tokens_text(search.budget, budget)}: no probe begins that could exceed"
            " it; if it does not reach to the end of the search, the best setting verified is taken"
        )
    if finished:
        lines.append(f"resuming   {counted(finished, 'finished probe')} will not be repeated")
    print_labelled(console, lines)


def share_up(tokens: int, budget: int) -> str:
    """Format a share as --budget takes it, rounded up to a tenth of a percent."""
    return f"--budget {math.ceil(1000 * tokens / budget) / 10:g}%"


def tokens_text(tokens: float, budget: int) -> str:
    """Format a number of tokens with its share of the budget."""
    return f"{human_count(tokens)} tokens ({tokens / budget:.1%} of a full run)"


def announce(
    console: Console, search: Search, probe: Probe, receipts: Mapping[str, Receipt]
) -> None:
    """Print which probe begins or goes on, and how many tokens were trained before it."""
    before = receipts.get(probe.name)
    text = f"probe {len(receipts) + 1}: {_setting(search, probe)}"
    if before is not None:
        text = f"going on: {_setting(search, probe)}, after step {before.stopped_at_step:,}"
    tokens = sum(receipt.tokens for receipt in receipts.values())
    if tokens:
        text += f" (so far {tokens_text(tokens, search.recipe.train.tokens)})"
    print_labelled(console, [text], indent=2)


def _setting(search: Search, probe: Probe) -> str:
    text = search.named(probe.start, f"{probe.steps:,}")
    if search.kind == "batch":
        text += f" ({search.ramp(probe.start, probe.steps)} sequences)"
    return f"{text}{_seed(search, probe)}, seen for {probe.horizon:,}"


def _seed(search: Search, probe: Probe) -> str:
    if len(search.all_seeds) == 1:
        return ""
    return f", seed {probe.seed}"


def show_receipt(console: Console, receipt: Receipt) -> None:
    """Print a probe's verdict, the reason and the cost."""
    why = f"largest fluctuation {receipt.max_fluctuation:.2f} at step {receipt.fluctuation_step:,}"
    spent = f"{human_count(receipt.tokens)} tokens, {human_seconds(receipt.seconds)}"
    print_labelled(console, [f"  {receipt.verdict}: {why}; {spent}"])


SHOWN = (
    "steps,seed,stopped_at_step,horizon,tokens,share_of_budget,seconds,"
    "max_fluctuation,fluctuation_step,verdict"
)
"""Columns of the receipts that the terminal has."""
SPARE = ("fluctuation_step", "horizon", "share_of_budget", "seconds", "stopped_at_step")
"""Those that a narrow terminal does without."""


def show_table(console: Console, search: Search, rows: Sequence[Mapping[str, object]]) -> None:
    """Print the receipts as a table."""
    columns = [*(["start"] * bool(search.start_name)), *SHOWN.split(",")]
    cells = []
    for row in rows:
        cells.append(tuple(str(row[column]) for column in columns))
    # Plain lines: in a narrow terminal a table of Rich's would cut numbers short.
    print_labelled(console, table_lines(tuple(columns), cells, SPARE))


def plot(path: Path, search: Search, receipts: Sequence[Receipt]) -> None:
    """Draw the probes' perplexity curves into a PNG."""
    from efftrain_cli.compare.picture import write_figure

    write_figure([_probes(search, receipts)], path)


def plot_in_terminal(console: Console, search: Search, receipts: Sequence[Receipt]) -> None:
    """Draw the curves of the last eight probes in characters."""
    from efftrain_cli.compare.picture import draw_in_terminal

    drawn = draw_in_terminal(_probes(search, receipts[-8:]), min(100, console.width))
    console.print(drawn, markup=False, soft_wrap=True)


def _probes(search: Search, receipts: Sequence[Receipt]) -> Plot:
    """Draw what is judged: perplexity over the best before it, which is 1 until a curve parts from
    its falling."""
    import pandas as pd

    from efftrain_cli.compare.picture import Plot, curve, letter

    curves = []
    for i, receipt in enumerate(receipts):
        best = math.inf
        ratios = []
        for _, loss in receipt.curve:
            best = min(best, loss)
            ratios.append(math.exp(min(loss - best, 700.0)) if math.isfinite(loss) else math.nan)
        label = f"{letter(i)} {_label(search, receipt)}: {receipt.verdict}"
        curves.append(curve(i, label, [step for step, _ in receipt.curve], ratios))
    return Plot(
        "probes",
        f"probes; dotted: unstable above {search.threshold:g}, and\n"
        f"the end of the learning-rate warmup (step {search.lr_warmup_steps:,})",
        pd.concat(curves, ignore_index=True),
        "step",
        "validation perplexity (full length) / its best so far",
        log="y",
        include=(search.threshold,),
        levels=(search.threshold,),
        ends=(search.lr_warmup_steps,),
    )


def _label(search: Search, receipt: Receipt) -> str:
    probe = receipt.probe
    return search.named(probe.start, str(probe.steps)) + _seed(search, probe)
