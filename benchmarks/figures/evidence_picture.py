"""Draws docs/evidence/effects.svg: every study's effects with their 95 % intervals, from the
looks.csv beside its page.

    python benchmarks/figures/evidence_picture.py

A panel per study, of its first primary measure at its last look; the study file says baseline,
direction and margin. A study called NAME has NAME/looks.csv; a second study of the same page,
PAGE-SECOND, has PAGE/SECOND-looks.csv.
"""

from __future__ import annotations

import csv
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

EVIDENCE = Path(__file__).resolve().parents[2] / "docs" / "evidence"
GOOD, BAD, OPEN = "#009E73", "#D55E00", "#8a8a8a"
COLOUR_OF = {
    "better": GOOD,
    "noninferior": GOOD,
    "equivalent": GOOD,
    "worse": BAD,
    "undecided": OPEN,
}
AXIS = {
    "final_loss": "final loss less {}'s, nats per token",
    "lr_sensitivity": "sensitivity less {}'s, nats per token",
    "tokens_to_target": "tokens to the same loss: {}'s / the arm's",
    "flops_to_target": "FLOPs to the same loss: {}'s / the arm's",
}
ROW = 0.2
"""Inches per arm."""


@dataclass(frozen=True)
class Panel:
    study: str
    baseline: str
    measure: str
    margin: float | None
    rows: tuple[tuple[str, float, float, float, str], ...]
    """Arm, estimate, low, high, outcome; without the arms that have no estimate."""


def panels(folder: Path) -> list[Panel]:
    """Every study that has been judged, by name."""
    found = []
    for path in sorted(folder.glob("*/*looks.csv")):
        name = path.parent.name + f"-{path.stem}".removesuffix("-looks")
        study = tomllib.loads((folder / f"{name}.toml").read_text())
        primary = study["primary"][0]
        rows = list(csv.DictReader(path.open()))
        last = max(int(row["look"]) for row in rows)
        values = tuple(
            (
                row["arm"],
                float(row["estimate"]),
                float(row["low"]),
                float(row["high"]),
                row["outcome"],
            )
            for row in rows
            if int(row["look"]) == last and row["measure"] == primary["measure"] and row["low"]
        )
        found.append(
            Panel(name, study["baseline"], primary["measure"], primary.get("margin"), values)
        )
    return found


def draw(axes: Axes, panel: Panel) -> None:
    ratio = panel.measure.endswith("_to_target")
    for height, (_, estimate, low, high, outcome) in enumerate(panel.rows):
        colour = COLOUR_OF[outcome]
        axes.plot((low, high), (height, height), color=colour, linewidth=2.2, solid_capstyle="butt")
        axes.plot(estimate, height, "o", color=colour, markersize=4.5)
    axes.set_yticks(range(len(panel.rows)), [row[0] for row in panel.rows])
    axes.set_ylim(len(panel.rows) - 0.4, -0.6)
    axes.axvline(1 if ratio else 0, color="#555555", linewidth=0.8)
    if panel.margin is not None and not ratio:
        axes.axvspan(-panel.margin, panel.margin, color="#56B4E9", alpha=0.18, linewidth=0)
    if ratio:
        axes.set_xscale("log")
        low, high = min(row[2] for row in panel.rows), max(row[3] for row in panel.rows)
        axes.set_xlim(min(low * 0.95, 0.9), max(high * 1.05, 1.1))
        left, right = axes.get_xlim()
        ticks = [
            tick for tick in (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10) if left <= tick <= right
        ]
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set_title(
        panel.study.replace("-", " "), fontsize=9.5, loc="left", fontweight="bold", pad=4
    )
    axes.set_xlabel(AXIS[panel.measure].format(panel.baseline), fontsize=8, labelpad=2)
    axes.tick_params(labelsize=8, length=2.5)
    axes.grid(axis="x", alpha=0.18, linewidth=0.6)
    axes.spines[["top", "right", "left"]].set_visible(False)


def picture(found: list[Panel]) -> Figure:
    """Panels in two columns of about the same height, each as high as its arms are many."""
    sizes = [len(panel.rows) * ROW + 0.75 for panel in found]
    columns: list[list[int]] = [[], []]
    for i in sorted(range(len(found)), key=lambda i: -sizes[i]):
        min(columns, key=lambda column: sum(sizes[j] for j in column)).append(i)
    height = max(sum(sizes[i] for i in column) for column in columns) + 0.25
    figure = Figure(figsize=(9.2, height), facecolor="white")
    for left, column in zip((0.115, 0.635), columns, strict=True):
        top = height - 0.25
        for i in sorted(column):
            tall = len(found[i].rows) * ROW
            axes = figure.add_axes((left, (top - 0.22 - tall) / height, 0.35, tall / height))
            draw(axes, found[i])
            top -= sizes[i]
    legend = (("shown, in the arm's favour", GOOD), ("shown, against it", BAD), ("undecided", OPEN))
    handles = [
        matplotlib.lines.Line2D([], [], color=colour, marker="o", linewidth=2.2, markersize=4.5)
        for _, colour in legend
    ]
    words = [word for word, _ in legend]
    if any(panel.margin for panel in found):
        handles.append(matplotlib.patches.Patch(color="#56B4E9", alpha=0.18))
        words.append("within the margin")
    figure.legend(
        handles, words, loc="upper center", ncols=4, frameon=False, fontsize=8.5, borderaxespad=0.2
    )
    return figure


def main() -> None:
    figure = picture(
        [panel for panel in panels(EVIDENCE) if panel.rows and math.isfinite(panel.rows[0][1])]
    )
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "effects"}):
        figure.savefig(EVIDENCE / "effects.svg", metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
