"""Draw docs/evidence/effects.svg: every study's effects with their 95 % intervals.

    python benchmarks/figures/evidence_picture.py

A panel per study, of its first measure at its last look, from the looks.csv beside its page: a
study called NAME has NAME/looks.csv; a second study of the same page, PAGE-SECOND, has
PAGE/SECOND-looks.csv.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

EVIDENCE = Path(__file__).resolve().parents[2] / "docs" / "evidence"
LEGEND = {
    "#009E73": "shown, in the arm's favour",
    "#D55E00": "shown, against it",
    "#8a8a8a": "undecided",
}
FAVOURABLE, AGAINST, UNDECIDED = LEGEND
COLOURS = {"worse": AGAINST, "undecided": UNDECIDED}
LABELS = {
    "final_loss": "final loss less {}'s, nats per token",
    "lr_sensitivity": "sensitivity less {}'s, nats per token",
    "flops_to_target": "FLOPs to the same loss: {}'s / the arm's",
}
ROW = 0.2
"""Inches per arm."""


def draw(axes: Axes, path: Path, effects: pd.DataFrame) -> None:
    """Draw a study: a row per arm."""
    first = effects.iloc[0]
    is_ratio = first.measure.endswith("_to_target")
    for height, row in enumerate(effects.itertuples()):
        colour = COLOURS.get(row.outcome, FAVOURABLE)
        axes.plot((row.low, row.high), (height, height), color=colour, linewidth=2.2)
        axes.plot(row.estimate, height, "o", color=colour, markersize=4.5)
    axes.set_yticks(range(len(effects)), list(effects.arm))
    axes.set_ylim(len(effects) - 0.4, -0.6)
    axes.axvline(1 if is_ratio else 0, color="#555555", linewidth=0.8)
    if is_ratio:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("{x:g}")
    elif first.margin > 0:
        axes.axvspan(-first.margin, first.margin, color="#56B4E9", alpha=0.18, linewidth=0)
    name = path.parent.name + f"-{path.stem}".removesuffix("-looks")
    axes.set_title(name.replace("-", " "), fontsize=9.5, loc="left", fontweight="bold", pad=4)
    baseline = "the baseline"
    study = EVIDENCE / f"{name}.toml"
    if study.exists():
        baseline = tomllib.loads(study.read_text())["baseline"]
    axes.set_xlabel(LABELS[first.measure].format(baseline), fontsize=8, labelpad=2)
    axes.tick_params(which="both", labelsize=8, length=2.5)
    axes.grid(axis="x", alpha=0.18, linewidth=0.6)
    axes.spines[["top", "right", "left"]].set_visible(False)


def main() -> None:
    found = []
    for path in sorted(EVIDENCE.glob("*/*looks.csv")):
        table = pd.read_csv(path)
        primary = table[table.measure == table.measure[0]]
        effects = primary[primary.look == primary.look.max()].dropna(subset="low")
        if len(effects):
            found.append((path, effects))
    # The longest panels side by side, so that little is left empty.
    found.sort(key=lambda study: -len(study[1]))
    heights = [len(effects) * ROW + 0.55 for _, effects in found[::2]]
    figure = Figure(figsize=(9.2, sum(heights) + 0.4), facecolor="white", layout="constrained")
    panels = figure.subplots(len(heights), 2, height_ratios=heights).flatten()
    for axes in panels[len(found) :]:
        axes.set_axis_off()
    for axes, study in zip(panels, found, strict=False):
        draw(axes, *study)
    handles = []
    for colour, label in LEGEND.items():
        handles.append(Line2D([], [], color=colour, marker="o", label=label))
    figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False, fontsize=8.5)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "effects"}):
        figure.savefig(EVIDENCE / "effects.svg", metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
