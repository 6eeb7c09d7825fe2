"""Zero-shot scores of a run as further numbers: shown with an interval over seeds, never tested."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from efftrain_cli.foundation.console import human
from efftrain_cli.foundation.errors import DataError
from efftrain_cli.run.names import select_runs
from efftrain_cli.run.reading import Run, load_run
from efftrain_cli.zeroshot.results import read_results


def load_scored_run(path: Path) -> Run:
    """Read a run directory with the scores of its zeroshot.json.

    Protocol, limit and the tokens of the checkpoint are part of a score's title: only scores that
    agree in all of them are compared.

    Raises:
        DataError: a file is missing, damaged or of another format.
    """
    scores = {}
    for entry in read_results(path):
        terms = [str(entry["protocol"])]
        if entry["limit"] is not None:
            terms.append(f"limit {entry['limit']:g}")
        if entry.get("tokens") is not None:
            terms.append(f"{human(entry['tokens'])} tokens")
        for name, metric in (entry.get("metrics") or {}).items():
            if metric["value"] is not None:
                title = f"{entry['task']} {name} ({', '.join(terms)})"
                scores[title] = float(metric["value"])
    run = load_run(path)
    return replace(run, facts={**run.facts, **scores})


def load_named_runs(names: Sequence[str]) -> tuple[list[Run], list[str]]:
    """Read the runs that names stand for; return them, and a caveat for each that is left out.

    Raises:
        UsageError: a name stands for nothing.
        DataError: no run can be read.
    """
    runs = []
    caveats = []
    for path in select_runs(names):
        try:
            runs.append(load_scored_run(path))
        except (DataError, OSError) as error:
            caveats.append(f"left out: {error}")
    if not runs:
        raise DataError("\n".join(caveats))
    return runs, caveats
