"""What `efftrain tune-warmup` shows: the search before it begins, each probe, and their curves. No torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from efftrain_cli.foundation.console import human_count, human_seconds, perplexity, table_lines
from efftrain_cli.tune_warmup.search import Cost, Probe, Receipt, Search

if TYPE_CHECKING:
    from rich.console import Console

    from efftrain_cli.compare.picture import Plot


def plan_values(search: Search) -> dict[str, Any]:
    """What `show_plan` says, for other programs. Durations and horizons in steps, costs in tokens."""
    grid, start = search.grid, search.grid.starts[0]
    return {
        "tunes": search.kind,
        "searches": [name for name in (grid.start_name, grid.duration_name) if name],
        "own": list(grid.own),
        "starts": list(grid.starts),
        "durations": list(grid.durations(start)),
        "window_steps": grid.window,
        "horizon_steps": grid.horizon(start, grid.home(start)),
        "threshold": search.threshold,
        "seeds": list(search.all_seeds),
        "budget": search.budget,
        "smallest_budget": search.smallest_budget(),
        "cost": {
            name: {"probes": cost.probes, "tokens": cost.tokens}
            for name, cost in costs_of(search).items()
        },
    }


def costs_of(search: Search) -> dict[str, Cost]:
    """By what the answer is: the recipe's own setting, any other one on average, and the dearest."""
    ends = [cost for _, cost in search.ends(late=False)]
    mean = Cost(
        sum(cost.probes for cost in ends) / len(ends), sum(cost.tokens for cost in ends) / len(ends)
    )
    own = {"own": search.own_cost(late=False), "own_at_most": search.own_cost(late=True)}
    return {**own, "mean": mean, "worst": search.worst_case()}


def show_plan(console: Console, search: Search, receipts: Sequence[Receipt] = ()) -> None:
    """What the search will ask, and what it costs, expected and at most, with the way that each takes."""
    grid, budget = search.grid, search.recipe.train.tokens
    start = grid.starts[0]
    durations, home = grid.durations(start), grid.home(start)
    horizon = grid.horizon(start, home)
    every = search.recipe_of(Probe(start=start, steps=home, seed=0, horizon=1)).eval.every
    unit = "sequences per step" if search.kind == "batch" else "tokens"
    starts = (
        f"{grid.start_name} from {start} to {grid.starts[-1]} {unit}, then "
        if grid.start_name
        else ""
    )
    own = grid.named(start, f"{home:,}")
    length = (
        f"the length of the ramp ({grid.duration_name})"
        if search.kind == "batch"
        else grid.duration_name
    )
    given = ", ".join(map(str, search.all_seeds))
    seeds = "" if len(search.all_seeds) == 1 else f"; each with seeds {given}, by the majority"
    beyond = {"lr": " for its own steps and", "two-stage": " up to the switch and"}.get(
        search.kind, ""
    )
    within = f"{grid.window:,} steps for the start, " if grid.start_name else ""
    # A forward pass, as validation is, is a third of a step's FLOPs.
    validated = (
        (1 + horizon // every) * search.recipe.eval.windows * search.recipe.model.seq_len / 3
    )
    costs = costs_of(search)
    lines = [
        f"searched   {starts}{length} from {durations[0]:,} to {durations[-1]:,} steps, each about 1.4 times its neighbour; "
        f"first {own}",
        f"probes     {within}{horizon:,} for {home:,} steps:{beyond} {search.multiples - bool(beyond)} learning-rate warmups "
        f"(--multiples {search.multiples}){seeds}. A probe that is asked for more goes on from where it stands",
        f"unstable   validation perplexity above {search.threshold:g} times its best so far (--threshold), validated every "
        f"{f'{every} steps' if every > 1 else 'step'}; the probe ends at once",
    ]
    if search.calm and search.multiples > 2:
        lines.append(
            f"calm       a probe ends early where its loss ratio does not rise, and a bound by the scatter and the trend so far makes a "
            f"fluctuation after any of its looks less likely than {search.calm:g} (--calm); not counted below"
        )
    lines += [
        f"cost       {_cost_text(costs['own'], budget)} if {own} is the answer, at most {tokens_text(costs['own_at_most'].tokens, budget)}",
        _way(search, costs["own"]),
        f"           {_cost_text(costs['mean'], budget)} on average over all answers on the grid",
        f"           {_cost_text(costs['worst'], budget)} for the dearest answer, if verdicts change once along the grid",
        _way(search, costs["worst"]),
        "           Each way: start/steps, the probe's last step, + stable or - unstable. An unstable probe is expected to be so half-way, "
        "at most at its last step",
        f"           Validation is not counted: in FLOPs {validated / grid.tokens(start, home, horizon):.1%} of the first probe's training",
    ]
    smallest = search.smallest_budget()
    if search.budget is None:
        lines.append(
            f"budget     none (--budget 10%); the smallest sensible one is {share_up(smallest, budget)}, the probe of {own}"
        )
    elif search.budget < smallest:
        lines.append(
            f"budget     {tokens_text(search.budget, budget)}: too little to verify {own}, which takes {tokens_text(smallest, budget)}; "
            f"the smallest sensible budget is {share_up(smallest, budget)}"
        )
    else:
        ends = [outcome.complete for outcome, _ in search.ends(late=False)]
        lines.append(
            f"budget     {tokens_text(search.budget, budget)}: no probe begins that could exceed it. Expected to reach the end of the search "
            f"for {sum(ends)} of the {len(ends)} answers on the grid; else the best setting verified is taken"
        )
    for line in lines:
        console.print(line, markup=False)
    if receipts:
        console.print(
            f"resuming   {len(receipts)} probes are finished and will not be repeated", markup=False
        )


def _cost_text(cost: Cost, budget: int) -> str:
    return f"{cost.probes:.3g} probe{'' if cost.probes == 1 else 's'}, {tokens_text(cost.tokens, budget)}"


def _way(search: Search, cost: Cost) -> str:
    """The probes that a search makes: each setting with its last step, + where it is stable there and - where not."""
    named = Counter(
        f"{receipt.probe.start}/" * bool(search.grid.start_name)
        + f"{receipt.probe.steps:,} {'+' if receipt.stable else '-'}{receipt.stopped_at_step:,}"
        for receipt in cost.receipts
    )
    return f"             {', '.join(text if seeds == 1 else f'{seeds} x {text}' for text, seeds in named.items())}"


def share_up(tokens: int, budget: int) -> str:
    """A share as --budget takes it, rounded up to a tenth of a percent."""
    return f"--budget {math.ceil(1000 * tokens / budget) / 10:g}%"


def tokens_text(tokens: float, budget: int) -> str:
    """A number of tokens, and its share of the budget."""
    return f"{human_count(tokens)} tokens ({tokens / budget:.1%} of a full run)"


def announce(console: Console, search: Search, probe: Probe, receipts: Sequence[Receipt]) -> None:
    """The probe, and the time that the rest can take at the rate so far."""
    left = search.worst_case(receipts)
    going_on = next((receipt for receipt in receipts if receipt.probe.name == probe.name), None)
    text = f"{f'probe {len(receipts) + 1}' if going_on is None else 'going on'}: {_setting(search, probe)}"
    if going_on is not None and going_on.lost_tokens == going_on.tokens:
        text += ", from its beginning, as its checkpoint is gone"
    elif going_on is not None:
        text += f", on from step {going_on.stopped_at_step:,}"
    tokens = sum(receipt.tokens for receipt in receipts)
    if tokens:
        rate = sum(receipt.seconds for receipt in receipts) / tokens
        text += f" (the rest of the search takes at most {human_seconds(rate * left.tokens)})"
    console.print(text, markup=False)


def _setting(search: Search, probe: Probe) -> str:
    ramped = (
        f" ({search.grid.ramp(probe.start, probe.steps)} sequences)"
        if search.kind == "batch"
        else ""
    )
    named = search.grid.named(probe.start, f"{probe.steps:,}")
    return f"{named}{ramped}{_seed(search, probe)}, seen for {probe.horizon:,}"


def _seed(search: Search, probe: Probe) -> str:
    return f", seed {probe.seed}" if len(search.all_seeds) > 1 else ""


def show_receipt(console: Console, receipt: Receipt) -> None:
    """The verdict, and why."""
    why = f"largest fluctuation {receipt.max_fluctuation:.2f} at step {receipt.fluctuation_step:,}"
    if receipt.calm is not None:
        left = receipt.probe.horizon - receipt.stopped_at_step
        why += f"; a fluctuation in the {left:,} steps left is less likely than {max(receipt.calm, 1e-4):.2g} if they go on as before"
    console.print(
        f"  {receipt.verdict}: {why}; {human_count(receipt.tokens)} tokens, {human_seconds(receipt.seconds)}",
        markup=False,
    )


def show_table(console: Console, search: Search, receipts: Sequence[Receipt]) -> None:
    """The receipts as a table."""
    with_start, with_seed = bool(search.grid.start_name), len(search.all_seeds) > 1
    columns = ("probe", *(["start"] * with_start), "steps", *(["seed"] * with_seed))
    rows = []
    for number, receipt in enumerate(receipts, 1):
        probe = receipt.probe
        rows.append((
            *(str(number), *([str(probe.start)] * with_start), str(probe.steps), *([str(probe.seed)] * with_seed)),
            *(f"{receipt.stopped_at_step}/{probe.horizon}", human_count(receipt.tokens)),
            *(f"{receipt.tokens / search.recipe.train.tokens:.1%}", f"{receipt.seconds:.0f}"),
            *(f"{receipt.max_fluctuation:.2f} at {receipt.fluctuation_step}", receipt.verdict),
        ))  # fmt: skip
    # Plain lines: in a narrow terminal a table of Rich's would cut numbers short.
    for line in table_lines(
        (*columns, "seen", "tokens", "of run", "s", "fluctuation", "verdict"), rows
    ):
        console.print(line, markup=False)


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
    import pandas as pd

    from efftrain_cli.compare.picture import Plot, curve, letter

    curves = []
    for i, receipt in enumerate(receipts):
        steps, losses = zip(*receipt.curve, strict=True)
        label = f"{letter(i)} {_label(search, receipt)}: {receipt.verdict}"
        perplexities = [perplexity(loss) if math.isfinite(loss) else math.nan for loss in losses]
        curves.append(curve(i, label, steps, perplexities))
    return Plot(
        "probes",
        f"probes; the dotted line ends the learning-rate warmup (step {search.grid.window})",
        pd.concat(curves, ignore_index=True),
        "step",
        "validation perplexity (full length)",
        log="y",
        ends=(search.grid.window,),
    )


def _label(search: Search, receipt: Receipt) -> str:
    probe = receipt.probe
    return search.grid.named(probe.start, str(probe.steps)) + _seed(search, probe)
