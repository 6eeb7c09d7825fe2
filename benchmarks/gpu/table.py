"""docs/performance.md's CUDA table, from what was measured."""

from __future__ import annotations

from collections.abc import Mapping

Results = dict[str, dict[str, dict[str, object]]]
"""piece -> part -> record: status, seconds, figures, and where it failed error and traceback."""

ESTIMATES: Mapping[str, float] = {
    "117M, 16 x 32 x 1024, as shipped": 575_000,
    "1.5B, 16 x 1024": 55_000,
    "ours / plain loop, 117M 32 x 1024": 1.05,
}
"""For one H200, from counted FLOPs and bytes: docs/performance.md has their basis."""

ROWS: tuple[tuple[str, str, str], ...] = (
    ("GPT-2 117M, whole step as shipped", "speed", "117M, 16 x 32 x 1024, as shipped"),
    ("GPT-2 1.5B on one device", "largest", "1.5B, 16 x 1024"),
    ("times as fast as a compiled plain loop", "reference", "ours / plain loop, 117M 32 x 1024"),
    ("device idle", "speed", "device idle"),
    ("stability measures", "speed", "stability measures"),
    ("graphs of a warmup over 128 lengths", "lengths", "graphs"),
    ("first step at a length, times the second", "lengths", "first step at a length / second"),
    ("tokens/s over the warmup, cuDNN kept away", "lengths", "tokens/s over the warmup"),
    ("FlashAttention only", "levers", "117M, attention by FlashAttention only"),
    ("fp32 residual stream", "levers", "117M, fp32 residual stream"),
    ("deterministic kernels", "levers", "117M, deterministic"),
    ("eager", "levers", "117M, eager"),
    ("layer dropping saves", "methods", "layer dropping saves"),
    ("SimiGrad's measurement costs", "methods", "SimiGrad's measurement costs"),
    ("growth's stall", "methods", "growth's stall"),
)
"""(row, piece, figure): the first figure of that name in the piece is taken."""


def number(value: object) -> str:
    """A value as the tables show it."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return str(value)


def _find(results: Results, piece: str, name: str) -> Mapping[str, object] | None:
    for record in results.get(piece, {}).values():
        for figure in record["figures"]:  # type: ignore
            if figure["name"] == name:
                return figure
    return None


def page_table(results: Results, about: str) -> str:
    """The table as Markdown; what was not measured says so."""
    lines = [about, "", "| | measured | | estimate |", "|---|--:|---|--:|"]
    for row, piece, name in ROWS:
        figure = _find(results, piece, name)
        estimate = number(float(ESTIMATES[name])) if name in ESTIMATES else ""
        value, note = (
            ("unmeasured", "")
            if figure is None
            else (f"{number(figure['value'])} {figure['unit']}".strip(), figure["note"])
        )
        lines.append(f"| {row} | {value} | {note} | {estimate} |")
    checks = [
        figure
        for parts in results.values()
        for record in parts.values()
        for figure in record["figures"]  # type: ignore
        if str(figure["note"]).startswith(("ok", "WRONG"))
    ]
    wrong = [figure for figure in checks if str(figure["note"]).startswith("WRONG")]
    lines += ["", f"{len(checks) - len(wrong)} of {len(checks)} checks against references hold."]
    lines += [
        f"- WRONG: {figure['name']}: {number(figure['value'])} ({figure['note']})"
        for figure in wrong
    ]
    return "\n".join(lines)


def full_table(results: Results) -> str:
    """Every figure, in plain text."""
    lines = []
    for piece, parts in results.items():
        for part, record in parts.items():
            lines.append(f"\n{piece}, {part}: {record['status']}, {record['seconds']:.0f} s")
            if "error" in record:
                lines.append(f"  {str(record['error'])[:600]}")
            for figure in record["figures"]:  # type: ignore
                value = number(figure["value"])
                line = f"  {figure['name']:72s} {value:>12s} {figure['unit']:16s} {figure['note']}"
                lines.append(line.rstrip())
    return "\n".join(lines)
