"""What `efftrain tune-warmup` shows: the search before it begins, each probe, and their curves. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from efftrain_cli.foundation.console import human_count, human_seconds
from efftrain_cli.tune_warmup.search import Probe, Receipt, Search

if TYPE_CHECKING:
    from rich.console import Console


def plan_values(search: Search) -> dict[str, Any]:
    """What `show_plan` says, for other programs. Durations and horizons in steps, costs in tokens."""
    likely, worst = search.if_start_is_stable(), search.worst_case()
    return {
        "searches": search.start_name,
        "starts": list(search.starts),
        "durations": list(search.durations(search.starts[0])),
        "window_steps": search.window,
        "horizon_steps": search.horizon,
        "threshold": search.threshold,
        "if_first_start_is_stable": {"probes": likely.probes, "tokens": likely.tokens},
        "worst_case": {"probes": worst.probes, "tokens": worst.tokens},
    }


def show_plan(console: Console, search: Search, receipts: Sequence[Receipt] = ()) -> None:
    """What the search will ask, and what it can cost at most."""
    budget = search.recipe.train.tokens
    likely, worst = search.if_start_is_stable(), search.worst_case()
    unit = "sequences per step" if search.searches_batch_size else "tokens"
    durations = search.durations(search.starts[0])
    every = search.recipe_of(search.probe_of_start(search.starts[0])).eval.every
    for line in (
        f"searched   {search.start_name} from {search.starts[0]} to {search.starts[-1]} {unit}, then the duration from "
        f"{durations[0]} to {durations[-1]} steps, in steps of {search.window}",
        f"probes     {search.window} steps each for the start, {search.horizon} for the duration (--multiples "
        f"{search.multiples} of the learning-rate warmup), validated every {f'{every} steps' if every > 1 else 'step'}",
        f"unstable   validation perplexity above {search.threshold:g} times its best so far (--threshold)",
        f"cost       at most {likely.probes} probes and {tokens_text(likely.tokens, budget)} if the first start is stable; at "
        f"most {worst.probes} probes and {tokens_text(worst.tokens, budget)} if not. Unstable probes stop early",
    ):
        console.print(line, markup=False)
    if receipts:
        console.print(f"resuming   {len(receipts)} probes are finished and will not be repeated", markup=False)


def tokens_text(tokens: int, budget: int) -> str:
    """A number of tokens, and its share of the budget."""
    return f"{human_count(tokens)} tokens ({tokens / budget:.1%} of a full run)"


def announce(console: Console, search: Search, probe: Probe, receipts: Sequence[Receipt]) -> None:
    """Probe i of at most n, and the time that the rest can take at the rate so far."""
    left = search.worst_case(receipts)
    text = f"probe {len(receipts) + 1} of at most {len(receipts) + left.probes}: {_setting(search, probe)}"
    tokens = sum(receipt.tokens for receipt in receipts)
    if tokens:
        rate = sum(receipt.seconds for receipt in receipts) / tokens
        text += f" (ETA of the search at most {human_seconds(rate * left.tokens)})"
    console.print(text, markup=False)


def _setting(search: Search, probe: Probe) -> str:
    ramp = search.recipe_with(probe.start, probe.steps).batch_size_warmup
    ramped = "" if ramp is None else f" ({ramp.sequences} sequences)"
    return f"start {probe.start}, {probe.steps} steps{ramped}, seen for {probe.horizon}"


def show_receipt(console: Console, receipt: Receipt) -> None:
    console.print(
        f"  {receipt.verdict}: largest fluctuation {receipt.max_fluctuation:.2f} at step {receipt.fluctuation_step}; "
        f"{human_count(receipt.tokens)} tokens, {human_seconds(receipt.seconds)}",
        markup=False,
    )


def show_table(console: Console, search: Search, receipts: Sequence[Receipt]) -> None:
    """The receipts as a table."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("probe", "start", "steps", "seen", "tokens", "of a run", "seconds", "fluctuation", "verdict"):
        table.add_column(column, justify="left" if column == "verdict" else "right", no_wrap=True)
    for number, receipt in enumerate(receipts, 1):
        table.add_row(
            *(str(number), str(receipt.probe.start), str(receipt.probe.steps)),
            *(f"{receipt.stopped_at_step}/{receipt.probe.horizon}", f"{receipt.tokens:,}"),
            *(f"{receipt.tokens / search.recipe.train.tokens:.1%}", f"{receipt.seconds:.1f}"),
            *(f"{receipt.max_fluctuation:.2f} at {receipt.fluctuation_step}", receipt.verdict),
        )
    console.print(table)


def plot(path: Path, search: Search, receipts: Sequence[Receipt]) -> None:
    """Draws the probes' perplexity curves; unstable ones are dashed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), dpi=110)
    for number, receipt in enumerate(receipts, 1):
        steps = [step for step, loss in receipt.curve if math.isfinite(loss)]
        axes.plot(
            steps,
            [perplexity(loss) for _, loss in receipt.curve if math.isfinite(loss)],
            "-" if receipt.stable else "--",
            linewidth=1.2,
            label=f"{number}: start {receipt.probe.start}, {receipt.probe.steps} steps, {receipt.verdict}",
        )
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("validation perplexity (full length)")
    axes.axvline(search.window, color="grey", linewidth=0.8, linestyle=":")
    axes.set_title(f"probes; the dotted line ends the learning-rate warmup (step {search.window})", fontsize=9)
    axes.legend(fontsize=7)
    figure.tight_layout()
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, format="png")
    pyplot.close(figure)
    temporary.replace(path)


def plot_in_terminal(console: Console, search: Search, receipts: Sequence[Receipt]) -> None:
    """The same curves in characters: perplexity on a log scale, at most the last eight probes."""
    import plotext

    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(min(100, console.width), 18)
    markers = "12345678"
    for marker, receipt in zip(markers, receipts[-8:], strict=False):
        points = [(step, loss / math.log(10)) for step, loss in receipt.curve if math.isfinite(loss)]
        plotext.plot(
            [step for step, _ in points],
            [value for _, value in points],
            marker=marker,
            label=f"start {receipt.probe.start}, {receipt.probe.steps} steps: {receipt.verdict}",
        )
    plotext.title("log10 of the validation perplexity, by step")
    console.print(plotext.uncolorize(plotext.build()), markup=False, soft_wrap=True)


def perplexity(loss: float) -> float:
    """exp of a loss in nats per token; infinite where a float cannot hold it."""
    return math.exp(loss) if loss < 700 else math.inf
