"""efftrain: train GPT models and measure which training-efficiency methods save tokens or time.

The functions of `__all__` are the Python API: each returns a pandas frame of what the command of
that name prints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import pandas as pd

__version__ = "0.1.0"
__all__ = ["comparison", "metrics", "runs"]


def metrics(run: str) -> pd.DataFrame:
    """Return a row per step of a run, a column per number of metrics.jsonl; NaN if a row has none.

    Rows that a resume replaced are left out.

    Args:
        run: the run's name or path, or the name of a recipe with one run.

    Raises:
        UsageError: there is no such run, or several.
        DataError: too much of the file is damaged.
    """
    from efftrain_cli.run.metrics import read_metrics
    from efftrain_cli.run.names import find_run

    return read_metrics(find_run(run)).frame


def runs(*names: str, sort: Literal["age", "name", "loss", "tokens"] = "age") -> pd.DataFrame:
    """Return a row per run, and a column per setting in which the runs differ, by its dotted key.

    Args:
        names: runs, or globs over runs; all runs without names.
        sort: age (the run written to last first), name, loss (lowest first) or tokens (most first).
    """
    from efftrain_cli.run_list import read_runs

    return read_runs(names, sort)


def comparison(
    *names: str,
    baseline: str | None = None,
    target_loss: float | None = None,
    margin: float | None = None,
    every_setting: bool = False,
    allow: bool = False,
    equal: Literal["tokens", "flops"] | None = None,
) -> pd.DataFrame:
    """Compare runs, grouped by recipe, with a baseline; return a row per measure and recipe.

    `values` are by seed; a missing one is the reason in words. If nothing was judged, `verdict` is
    missing, `reason` says why in words and `kind` in one word for programs.

    Args:
        names: runs, globs over runs, or recipes with runs; all runs without names.
        baseline: a recipe, or a run of it; default: the only recipe without a method.
        target_loss: nats per token, to which costs are read; default: the worse run's final loss.
        margin: nats per token within which two final losses count as equivalent.
        every_setting: compare each setting of a recipe instead of its best.
        allow: compare runs whose losses are not comparable; nothing about them is judged.
        equal: the budget that final losses are judged at, equal within 2 %; default: tokens, or
            FLOPs if only these agree.

    Raises:
        UsageError: names stand for no run, or for runs that must not be compared.
        DataError: no run can be read.
    """
    from efftrain_cli.compare.comparison import compare, read_valid_runs
    from efftrain_cli.compare.frames import frame_of
    from efftrain_cli.compare.sisters import count_sisters
    from efftrain_cli.run.names import select_runs

    paths = select_runs(names or ["*"])
    read, left_out = read_valid_runs(paths)
    found = compare(
        read,
        baseline=baseline,
        target_loss=target_loss,
        margin=margin,
        every_setting=every_setting,
        allow=allow,
        equal=equal,
        left_out=left_out,
        sisters=count_sisters(paths),
    )
    return frame_of(found)
