"""Searches of each kind, and probes that answer as a function of their setting."""

from __future__ import annotations

from collections.abc import Callable

from efftrain_cli.methods.batch_size_warmup import BatchSizeWarmup
from efftrain_cli.methods.seq_len_warmup import SeqLenWarmup
from efftrain_cli.plan.plan import plan_run
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.recipe.sections import Model, Optim, Train
from efftrain_cli.tune_warmup.inquiry import Outcome
from efftrain_cli.tune_warmup.search import Probe, Receipt, Search

FULL, BATCH, BUDGET, WINDOW = 64, 10, 200_000, 20


def recipe(**sections: object) -> Recipe:
    return Recipe(
        model=Model(n_layer=1, n_head=1, n_embd=8, seq_len=FULL),
        optim=Optim(lr=1e-3, **{"warmup_steps": WINDOW, **sections.pop("optim", {})}),  # type: ignore
        train=Train(tokens=BUDGET, batch_size=BATCH),
        **sections,
    )


SLW = Search(recipe=recipe(seq_len_warmup=SeqLenWarmup(start=8, steps=80)))
RAMP = Search(recipe=recipe(batch_size_warmup=BatchSizeWarmup(start=2, increment=2, sequences=400)))
TWO = Search(
    recipe=recipe(seq_len_warmup=SeqLenWarmup(pacing="discrete", lengths=(8, FULL), until=(80,)))
)
LR = Search(recipe=recipe(), tune="lr")
FILLED = Search(recipe=recipe(seq_len_warmup=SeqLenWarmup(start=8, steps=80, batch="tokens")))
LAST = Search(recipe=recipe(seq_len_warmup=SeqLenWarmup(start=8, steps=350)))
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
    search: Search, fails: Callable[[Probe], float | None], limit: int = 60
) -> tuple[Outcome, dict[str, Receipt]]:
    """The search where a probe is unstable at step fails(probe), or never; receipts by name, in the order of the first
    question."""
    receipts: dict[str, Receipt] = {}
    for _ in range(limit):
        probe = search.next(list(receipts.values()))
        if isinstance(probe, Outcome):
            return probe, receipts
        before = receipts.get(probe.name)
        assert before is None or (before.stable and before.stopped_at_step < probe.horizon), (
            "asked for what is known"
        )
        failure = fails(probe)
        unstable = failure is not None and failure <= probe.horizon
        stopped = int(failure) if unstable and failure is not None else probe.horizon
        receipts[probe.name] = Receipt(
            probe=probe,
            stable=not unstable,
            max_fluctuation=2.0 if unstable else 1.0,
            fluctuation_step=stopped,
            stopped_at_step=stopped,
            tokens=tokens_by_plan(search, probe, stopped),
            seconds=1.0,
            curve=(),
        )
    raise AssertionError("the search does not end")


_COUNTED: dict[tuple[str, int, int], list[int]] = {}


def tokens_by_plan(search: Search, probe: Probe, step: int) -> int:
    """Tokens trained at the end of a step by the plan of the probe's recipe, step by step."""
    key = (repr(search.recipe), probe.start, probe.steps)
    if key not in _COUNTED:
        _COUNTED[key] = [0, *(after.tokens for _, after in plan_run(search.recipe_of(probe)))]
    counted = _COUNTED[key]
    return counted[min(step, len(counted) - 1)]


def ordered(search: Search, first_start: float, furthest: float) -> Callable[[Probe], float | None]:
    """Starts from `first_start` on are stable at the very beginning, and durations up to `furthest` to the end."""

    def fails(probe: Probe) -> float | None:
        if probe.start < first_start:
            return WINDOW
        beyond = probe.steps < furthest if search.kind == "lr" else probe.steps > furthest
        return search.grid.horizon(probe.start, probe.steps) if beyond else None

    return fails
