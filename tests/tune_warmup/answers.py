"""Searches of each kind, and probes that answer as a function of their setting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from zlib import crc32

from efftrain_cli.plan.plan import plan_run
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.tune_warmup.probe import Probe, Receipt
from efftrain_cli.tune_warmup.search import Finder, Outcome, Search
from tests.tiny import tiny_recipe

Fails = Callable[[Probe], float | None]
"""The step at which a probe is unstable; None: never."""

FULL, BATCH, BUDGET, WINDOW = 64, 10, 200_000, 20


def recipe(*overrides: str) -> Recipe:
    return tiny_recipe(
        "model={n_layer = 1, n_head = 1, n_embd = 8, seq_len = 64}",
        "optim={lr = 1e-3, warmup_steps = 20}",
        "train.tokens=200_000",
        "train.batch_size=10",
        *overrides,
    )


SLW = Search(recipe=recipe("seq_len_warmup={start = 8, steps = 80}"))
RAMP = Search(recipe=recipe("batch_size_warmup={start = 2, increment = 2, sequences = 400}"))
TWO = Search(recipe=recipe("seq_len_warmup={pacing = 'discrete', lengths = [8, 64], until = [80]}"))
LR = Search(recipe=recipe(), tune="lr")
FILLED = Search(recipe=recipe("seq_len_warmup={start = 8, steps = 80, batch = 'tokens'}"))
LAST = Search(recipe=recipe("seq_len_warmup={start = 8, steps = 350}"))
KINDS = {
    "length": SLW,
    "length, the recipe's own the longest": LAST,
    "length at constant tokens": FILLED,
    "batch": RAMP,
    "two-stage": TWO,
    "lr": LR,
}


def options(search: Search, **changed: object) -> Search:
    from dataclasses import replace

    return replace(search, **changed)  # type: ignore[arg-type]


def answered(
    search: Search,
    fails: Fails,
    plain: float | None = 1,
    before: Sequence[Receipt] = (),
) -> tuple[Outcome, dict[str, Receipt]]:
    """The search where a probe is unstable at step fails(probe), or never, and training without a
    warmup at step `plain`; receipts by name, in the order in which they ended. `before`: receipts
    that it begins with."""
    asked: list[str] = []

    def run(probe: Probe) -> Receipt:
        asked.append(probe.name)
        assert len(asked) < 60, "the search does not end"
        known = finder.receipts.get(probe.name)
        assert known is None or (known.stable and known.stopped_at_step < probe.horizon), (
            "asked for what is known"
        )
        failure = fails(probe) if probe.steps else plain
        unstable = failure is not None and failure <= probe.horizon
        stopped = int(failure) if unstable and failure is not None else probe.horizon
        return Receipt(
            probe=probe,
            stable=not unstable,
            max_fluctuation=2.0 if unstable else 1.0,
            fluctuation_step=stopped,
            stopped_at_step=stopped,
            tokens=tokens_by_plan(search, probe, stopped),
            seconds=1.0,
            curve=(),
        )

    finder = Finder(search, before, run)
    return finder.find(), finder.receipts


def first_probe(search: Search, before: Sequence[Receipt] = ()) -> Probe | Outcome:
    """The first probe that a search asks for after receipts, or its outcome."""

    class Asked(Exception):
        pass

    probes: list[Probe] = []

    def run(probe: Probe) -> Receipt:
        probes.append(probe)
        raise Asked

    try:
        return Finder(search, before, run).find()
    except Asked:
        return probes[0]


_COUNTED: dict[tuple[str, int, int], list[int]] = {}


def tokens_by_plan(search: Search, probe: Probe, step: int) -> int:
    """Tokens trained at the end of a step by the plan of the probe's recipe, step by step."""
    key = (repr(search.recipe), probe.start, probe.steps)
    if key not in _COUNTED:
        _COUNTED[key] = [0, *(after.tokens for _, after in plan_run(search.recipe_of(probe)))]
    counted = _COUNTED[key]
    return counted[min(step, len(counted) - 1)]


def ordered(search: Search, first_start: float, furthest: float) -> Fails:
    """Starts from `first_start` on are stable at the very beginning, and durations up to `furthest`
    to the end."""

    def fails(probe: Probe) -> float | None:
        if probe.start < first_start:
            return WINDOW
        beyond = probe.steps < furthest if search.kind == "lr" else probe.steps > furthest
        return search.horizon(probe.start, probe.steps) if beyond else None

    return fails


def hashed(seed: int, share: float) -> Fails:
    """Verdicts without any order: a share of the probes is unstable, at any step."""

    def fails(probe: Probe) -> float | None:
        draw = crc32(f"{seed} {probe.start} {probe.steps} {probe.seed}".encode())
        return 1 + draw % 97 if (draw >> 8) % 1000 < 1000 * share else None

    return fails
