"""Comparisons of made runs, one for each way in which a verdict may be reached or withheld."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from efftrain_cli.compare.comparison import Comparison
from tests.compare.known_runs import DEAD, PLD, SLW, curve, of, write_pair
from tests.compare.test_zero_shot import zero_shot
from tests.fake_runs import rows_of, write_run

Make = Callable[[Path], Comparison]


def plain(root: Path) -> Comparison:
    write_pair(root)
    return of("small", "small-slw")


def one_seed_with_scores(root: Path) -> Comparison:
    for name, more in (("small", ""), ("small-slw", SLW)):
        zero_shot(write_run(root, name, 0, more=more), [True] * (10 + len(more)) + [False] * 90)
    return of("small", "small-slw")


def failed(root: Path) -> Comparison:
    write_pair(root, 5)
    for seed in range(5):
        write_run(root, "pld", seed, more=PLD, **DEAD)
    return of("small", "small-slw", "pld", target_loss=3.2)


def failed_once(root: Path) -> Comparison:
    """The method has the lower loss over the four pairs that finished."""
    for seed in range(5):
        write_run(root, "small", seed)
        options = {"speed": 1.3} if seed else DEAD
        write_run(root, "small-slw", seed, more=SLW, **options)
    return of("small", "small-slw")


def pending(root: Path) -> Comparison:
    write_pair(root)
    write_run(root, "small-slw", 3, steps=50, budget=102400, more=SLW)
    return of("small", "small-slw")


def few(root: Path) -> Comparison:
    write_pair(root)
    write_run(root, "small", 3, **DEAD)
    return of("small", "small-slw")


def settings(root: Path) -> Comparison:
    for seed in range(3):
        write_run(root, "small", seed)
        write_run(root, "small", seed, name=f"fast-{seed}", lr=2e-3)
    return of("small")


def moved(root: Path) -> Comparison:
    """Seconds are withheld for the marks alone: device and threads are equal in the origins."""
    for name, threads in (("small", 2), ("small-slw", 4)):
        for seed in range(3):
            events = [
                {"event": "start", "threads": 2},
                {"event": "resume", "threads": threads},
            ]
            write_run(root, name, seed, more=SLW if threads == 4 else "", events=events)
    return of("small", "small-slw")


def allowed(root: Path) -> Comparison:
    write_run(root, "small", 0)
    write_run(root, "small-slw", 0, more=SLW, data={"valid_hash": "d" * 64})
    return of("small", "small-slw", allow=True)


def uncounted(root: Path) -> Comparison:
    """Rows of Muon from before its own FLOPs were counted."""
    for seed in range(3):
        write_run(root, "small", seed)
        rows = [row | {"optimizer_flops": None} for row in rows_of(100, seed, 1.3)]
        path = write_run(root, "muon", seed, rows=rows) / "recipe.toml"
        path.write_text(
            path.read_text().replace("[optim]", '[optim]\nname = "muon"\nmuon_lr = 0.02')
        )
    return of("small", "muon")


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
    return of("small", "long", baseline="small", equal="flops")


def much_longer(root: Path) -> Comparison:
    for seed in range(3):
        write_run(root, "small", seed, steps=50)
        write_run(root, "long", seed, steps=100, more=SLW)
    return of("small", "long", baseline="small", equal="tokens")


def not_reached(root: Path) -> Comparison:
    """No run of the baseline comes down to the target."""
    for seed in range(5):
        write_run(root, "small", seed)
        write_run(root, "small-slw", seed, speed=1.3, more=SLW)
    return of("small", "small-slw", target_loss=3.18)
