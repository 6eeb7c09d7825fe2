"""How much text a run needs: a Hub dataset is read as far as that, and no farther."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from efftrain_cli.data.text import names_hub

if TYPE_CHECKING:
    from efftrain_cli.recipe.recipe import Recipe


class Limits(NamedTuple):
    """Tokens to prepare at most; the document that reaches a limit is the last. None: all there is."""

    train: int | None
    valid: int | None


def limits_of(recipe: Recipe) -> Limits | None:
    """How much text to prepare for a recipe; None for all of it.

    Without data.max_tokens, a Hub dataset is read as far as the budget needs, rounded up to a power of two, so that
    recipes of about one budget share a corpus. Its validation text depends on eval.windows and model.seq_len alone: two
    runs of different budgets are validated on the same text.
    """
    data = recipe.data
    if not names_hub(data):
        return None if data.max_tokens is None else Limits(data.max_tokens, None)
    from efftrain_cli.plan.preview import summarize_plan

    seq_len = recipe.model.seq_len
    train = data.max_tokens or _power_of_two((summarize_plan(recipe).windows + 2) * seq_len)
    return Limits(train, _power_of_two(recipe.eval.windows * seq_len + 1))


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def apportion(weights: list[float], total: int) -> list[int]:
    """`total` shared out by weight in whole numbers, the largest remainders first (Hamilton's method)."""
    exact = [weight * total / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: shares[i] - exact[i])
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return shares
