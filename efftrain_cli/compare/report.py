"""A comparison as a document: HTML, Markdown or LaTeX, whose text is in templates/.

The page is one file for everything: no network, no scripts, for phones too, light and dark.
"""

from __future__ import annotations

from efftrain_cli.compare.comparability import SIGNS
from efftrain_cli.compare.comparison import Comparison
from efftrain_cli.compare.formats import format_value, origin_values
from efftrain_cli.compare.picture import inline_svg
from efftrain_cli.compare.plots import plots_of
from efftrain_cli.compare.tables import Table, opening_lines, tables_of


def document(comparison: Comparison, kind: str) -> str:
    """Return the page ("html"), GitHub's "markdown", or "latex" for the booktabs package."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from tabulate import LATEX_ESCAPE_RULES, tabulate

    def form(table: Table, name: str) -> str:
        rows = table.rows
        if name == "github":
            rows = [tuple(cell.replace("|", "\\|") for cell in row) for row in rows]
        return tabulate(rows, table.header, tablefmt=name, disable_numparse=True)

    environment = Environment(
        loader=PackageLoader("efftrain_cli.compare"),
        autoescape=kind == "html",
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    escapes = str.maketrans(LATEX_ESCAPE_RULES)
    environment.filters |= {
        "form": form,
        "latex": lambda text: text.translate(escapes).rstrip("."),
        "setting": format_value,
        "origin": origin_values,
        "svg": inline_svg,
    }
    text = environment.get_template(f"report.{kind}").render(
        comparison=comparison,
        opening=opening_lines(comparison),
        plots_of=plots_of,
        signs=SIGNS,
        tables=tables_of(comparison),
    )
    if kind == "latex":
        text = text.replace("±", r"$\pm$")
    return f"{text.strip()}\n"
