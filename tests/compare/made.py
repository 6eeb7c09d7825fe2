"""Comparisons of made runs, one for each way in which a verdict may be reached or withheld."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from efftrain_cli.compare.comparison import Comparison
from tests.compare.known_runs import SLW, curve, of, write_pair
from tests.fake_runs import rows_of, write_run

Make = Callable[[Path], Comparison]


def pending(root: Path) -> Comparison:
    write_pair(root)
    write_run(root, "small-slw", 3, steps=50, budget=102400, more=SLW)
    return of("small", "small-slw")


def settings(root: Path) -> Comparison:
    for seed in range(3):
        write_run(root, "small", seed)
        write_run(root, "small", seed, name=f"fast-{seed}", lr=2e-3)
    return of("small")


def half_decayed(root: Path) -> Comparison:
    write_pair(root)
    for seed in range(3):
        path = root / f"small-slw-seed{seed}" / "recipe.toml"
        recipe = path.read_text()
        path.write_text(recipe.replace("[optim]", "[optim]\ndecay_tokens = 200_000"))
    return of("small", "small-slw")


def other_evaluations(root: Path) -> Comparison:
    more = SLW + "\n[eval]\nevery = 15\n"
    for seed in range(3):
        write_run(root, "small", seed, more="\n[eval]\nevery = 10\n")
        write_run(root, "small-slw", seed, rows=rows_of(100, seed, 1.3, every=15), more=more)
    return of("small", "small-slw")


def sparse(root: Path) -> Comparison:
    for seed in range(3):
        curve(root, [6.0, 5.0, 4.0 + seed / 100], "base", seed)
        curve(root, [6.0, 3.5, 3.4 + seed / 200], "method", seed, more=SLW)
    return of("base", "method")


def longer(root: Path) -> Comparison:
    """The second recipe trains twice the tokens at the same FLOPs."""
    for seed in range(3):
        write_run(root, "small", seed, steps=50)
        rows = [row | {"total_flops": row["total_flops"] / 2} for row in rows_of(100, seed, 1.3)]
        write_run(root, "long", seed, rows=rows, steps=100, more=SLW)
    return of("small", "long", baseline="small")


def much_longer(root: Path) -> Comparison:
    for seed in range(3):
        write_run(root, "small", seed, steps=50)
        write_run(root, "long", seed, steps=100, more=SLW)
    return of("small", "long", baseline="small")
