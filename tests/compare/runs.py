"""Runs for the judge, made without directories: a curve of given losses, and what decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from efftrain_cli.run.reading import CURVE, Run

KNOWN = {
    "data.valid_hash": "b",
    "data.tokenizer_hash": "c",
    "data.valid_windows": 64,
    "data.seq_len": 128,
}
"""What makes losses compare."""


def curve_of(losses: Sequence[float], tokens: float = 1000.0, flops: float = 6.0) -> pd.DataFrame:
    """Evaluations at equal distances up to so many tokens of so many FLOPs each; 1 s a token."""
    at = np.linspace(0.0, tokens, len(losses))
    columns = [at / 10, at, at * flops, at, np.array(losses)]
    return pd.DataFrame(dict(zip(CURVE, columns, strict=True)))


def make_run(
    arm: str,
    seed: int,
    losses: Sequence[float],
    *,
    status: str = "finished",
    tokens: float = 1000.0,
    flops: float = 6.0,
    **settings: Any,
) -> Run:
    """A run of an arm whose evaluations are `losses`."""
    # Training losses differ by seed, not by arm: both sides begin with the same weights.
    opening = tuple(float(10 + seed + step / 10) for step in range(3))
    return Run(
        name=f"{arm}-seed{seed}",
        arm=arm,
        seed=seed,
        status=status,
        curve=curve_of(losses, tokens, flops),
        settings={"label": arm, "train.tokens": tokens, **settings},
        conditions=KNOWN,
        opening=opening,
    )


def make_arm(arm: str, finals: Sequence[float], first: int = 0, **options: Any) -> list[Run]:
    """A run per final loss, with seeds from `first`; each falls to it in ten equal steps."""
    runs = []
    for seed, final in enumerate(finals, first):
        losses = list(np.linspace(6.0, final, 11))
        runs.append(make_run(arm, seed, losses, **options))
    return runs
