"""efftrain: train GPT models and measure which training-efficiency methods save tokens or time.

The functions of `__all__` are the Python API: each returns what the command of that name prints, as
pandas frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

    from efftrain_cli.compare.comparison import Comparison
    from efftrain_cli.study.plans import Plan

__version__ = "0.1.0"
__all__ = ["comparison", "metrics", "race", "runs", "study"]


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


def runs(*names: str) -> pd.DataFrame:
    """Return a row per run, the one written to last first, and a column per setting in which the
    runs differ, by its dotted key.

    Args:
        names: runs, or globs over runs; all runs without names.
    """
    from efftrain_cli.run_list import read_runs

    return read_runs(names)


def comparison(
    *names: str,
    baseline: str | None = None,
    target_loss: float | None = None,
    margin: float = 0.0,
    every_setting: bool = False,
    allow: bool = False,
) -> Comparison:
    """Compare runs, grouped by recipe, with a baseline.

    The frames `.results .runs .settings .gains` and `.figures()` hold what the command prints.

    Args:
        names: runs, globs over runs, or recipes with runs; all runs without names.
        baseline: a recipe, or a run of it; default: the first recipe without a method.
        target_loss: nats per token, to which costs are read too.
        margin: nats per token within which two final losses count as equivalent.
        every_setting: compare each setting of a recipe instead of its best.
        allow: compare runs whose losses are not comparable; nothing about them is judged.

    Raises:
        UsageError: names stand for no run, or for runs that must not be compared.
        DataError: a run cannot be read.
    """
    from efftrain_cli.compare.comparison import compare
    from efftrain_cli.compare.judge import claim_of
    from efftrain_cli.compare.sources import load_named_runs

    read, left_out = load_named_runs(names or ["*"])
    found = compare(
        read,
        baseline=baseline,
        claims=[claim_of(margin)],
        target=target_loss,
        every_setting=every_setting,
        allow=allow,
    )
    found.caveats.extend(left_out)
    return found


def study(file: str | Path, *, device: str = "auto", jobs: int = 1) -> Comparison:
    """Train what a study file still needs, and judge it.

    Raises:
        EfftrainError: the file breaks rules, or a run cannot be trained.
    """
    from efftrain_cli.study.plans import read_study

    return _conduct(read_study(Path(file)), device, jobs)


def race(
    *arms: str,
    pairs: Sequence[int] = (3, 5, 8),
    margin: float = 0.0,
    settings: Sequence[str] = (),
    device: str = "auto",
    jobs: int = 1,
) -> Comparison:
    """Train recipes pair by pair until the answer is in; the first is the baseline.

    Args:
        pairs: numbers of pairs at which to look.
        margin: nats per token that do not matter.
        settings: overrides of all recipes, `key=value`.

    Raises:
        EfftrainError: a recipe breaks rules, or a run cannot be trained.
    """
    from efftrain_cli.compare.judge import claim_of
    from efftrain_cli.study.race import race_plan

    plan = race_plan(
        arms,
        claim_of(margin),
        pairs,
        tuple(settings),
        device=device,
    )
    return _conduct(plan, device, jobs)


def _conduct(plan: Plan, device: str, jobs: int) -> Comparison:
    from efftrain_cli.study.conduct import conduct, runner_of

    return conduct(plan, runner_of(plan, device, jobs=jobs))
