"""`efftrain compare` as it is typed: formats, exit codes, widths, files."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console
from typer.testing import Result

from efftrain_cli.compare.comparison import compare, read_valid_runs
from efftrain_cli.compare.formats import format_number
from efftrain_cli.compare.groups import Group
from efftrain_cli.compare.picture import Plot, curve, draw_figure, draw_in_terminal, letter
from efftrain_cli.compare.plots import plots_of
from efftrain_cli.compare.show import print_tables
from efftrain_cli.compare.tables import Table, answers, tables_of
from efftrain_cli.foundation.errors import DiskError, UsageError
from efftrain_cli.run.names import select_runs
from tests.compare.known_runs import DEAD, SLW, write_pair
from tests.conftest import invoke, python
from tests.fake_runs import rows_of, write_run
from tests.terminal import on_terminal


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two recipes of three seeds; the folder of runs."""
    root = tmp_path / "runs"
    monkeypatch.setenv("EFFTRAIN_RUNS", str(root))
    monkeypatch.chdir(tmp_path)
    write_pair(root)
    return root


def run(*words: str) -> Result:
    """The command in this process; a refusal is raised as it is."""
    result = invoke("compare", *words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_table_in_a_pipe_folds_nothing(two):
    out = run("small", "small-slw").stdout
    assert "\x1b" not in out
    row = next(line for line in out.splitlines() if line.startswith("tokens to match"))
    assert re.fullmatch(r"tokens to match +1\.30x \[1\.\d\d, 1\.\d\d\] +\S+ +better *", row)


def test_the_verdict_comes_first_and_every_table_fits_80_columns(two):
    out = run("small", "small-slw").stdout
    claim = (
        r"B small-slw is better than A small in final loss: -0\.\d{4} \[-0\.\d{4}, -0\.\d{4}\]"
        r" nats/token, p [=<] "
    )
    assert re.match(claim, out)
    _, key, table, _ = out.split("\n\n")
    rows = [line.rstrip() for line in table.partition("\nLosses in ")[0].splitlines()]
    assert max(map(len, [*key.splitlines(), *rows])) <= 80
    details = run("small", "small-slw", "--details").stdout
    assert (
        "could have seen" in details
        and "final perplexity" in details
        and "small-slw-seed2" in details
    )
    assert "could have seen" not in out


def test_formats_agree(two):
    value = json.loads(run("small", "small-slw", "--format", "json").stdout)
    out = run("small", "small-slw", "--format", "csv", "-o", "c.csv")
    assert out.stdout == ""
    table = pd.read_csv("c.csv").set_index(["measure", "recipe"])
    rows = {(row["measure"], row["arm"]): row for row in value["rows"]}
    final, cost = (rows[key, "small-slw"] for key in ("final_loss", "tokens_to_match"))
    assert table.loc[("final_loss", "small-slw"), "mean"] == final["mean"]
    assert table.loc[("tokens_to_match", "small-slw"), "estimate"] == cost["estimate"]
    assert (value["schema_version"], cost["verdict"], cost["reason"]) == (3, "better", None)
    loss = f"{final['mean']:.4f}"
    for kind in ("table", "markdown", "latex"):
        assert loss in run("small", "small-slw", "--format", kind).stdout


def test_latex_escapes(two):
    out = run("small", "small-slw", "--format", "latex").stdout
    assert r"seq\_len\_warmup.start" in out and r"95 \%" in out and "±" not in out
    assert r"\caption{}" not in out and out.count(r"\caption{") > 4


def test_report_is_one_small_file_without_network(two):
    # Whatever a run says of itself is text, never markup.
    origin = json.loads((two / "small-seed0" / "origin.json").read_text()) | {
        "platform": "<script>alert(1)</script><img>"
    }
    (two / "small-seed0" / "origin.json").write_text(json.dumps(origin))
    run("small", "small-slw", "--format", "html")
    page = Path("report.html").read_text()
    assert len(page.encode()) < 2_000_000
    assert not re.search(r"<script|<link|<img|@import|url\((?!#)|(?:src|href)=\"(?!#)", page)
    assert set(re.findall(r"https?://[^\s\"<)]+", page)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert "prefers-color-scheme: dark" in page and 'name="viewport"' in page
    assert page.count("<svg") == 12 and "currentColor" in page and "#010203" not in page
    assert page.index("B small-slw is better than A small") < page.index("<svg")
    run("small", "small-slw", "--format", "html", "-o", "again.html")
    assert Path("again.html").read_text() == page
    assert "_<wbr>" in page and ".<wbr>" not in page  # "10.6 GFLOPs" stays whole
    for word in (
        "&lt;script&gt;",
        "small-slw-seed2: finished",
        "\nseq_len_warmup.start = 8\nseq_len_warmup.steps = 10\n",
        "\ntorch: 2.13.0+cpu\n",
        "\nsteps: 100\ntrain seconds: 5.000\n",
        "nats/token",
        "validation loss",
    ):
        assert word in page


def test_figures_are_written(two):
    run("small", "small-slw", "--figures", "f")
    names = {path.name for path in Path("f").iterdir()}
    assert {
        *[
            "difference.svg",
            "loss-late.png",
            "loss.svg",
            "grad-norm.svg",
            "loss-tokens.svg",
            "loss-flops.png",
        ],
        *["loss-seconds.svg", "seq-len.png", "lr.svg", "loss-ratio.png"],
    } <= names


def test_terminal_plot(two):
    out = run("small", "small-slw", "--plot").stdout
    assert out.count("validation loss (nats/token)") == 3
    assert out.count("\nA small (3 seeds), B small-slw (3 seeds)") == 3
    for axis in ("tokens trained", "FLOPs executed", "training time (s)"):
        assert axis in out
    assert "\x1b" not in out


def test_a_flat_curve_is_drawn_in_the_terminal(two):
    for seed in range(2):
        write_run(two, "flat", seed, rows=[row | {"val_loss": 4.0} for row in rows_of(100, seed)])
    assert run("flat", "--plot").stdout.count("validation loss (nats/token)") == 3


def test_the_figure_of_differences_is_a_mean_with_its_t_interval(two):
    """Seeds 0.1 and 0.3 apart: 0.2 and t(1) = 12.706 times 0.1414 / sqrt 2 on either side; and 5
    nats at the start."""
    for seed, gap in enumerate((0.1, 0.3)):
        rows = rows_of(100, seed)
        write_run(two, "flat", seed, rows=[at(row, 4.0) for row in rows])
        higher = [at(row, 4.0 + gap) for row in rows]
        higher[0] = at(rows[0], 9.0)
        write_run(two, "fall", seed, rows=higher, more=SLW)
    comparison = compare(read_valid_runs([*two.glob("flat-*"), *two.glob("fall-*")])[0])
    plot = next(plot for plot in plots_of(comparison) if plot.name == "difference")
    start, *_, last = plot.curves.itertuples()
    assert (start.y, start.low, start.high) == (5.0, 5.0, 5.0)
    half = 12.706 * 0.1414 / 2**0.5
    assert (last.y, last.low, last.high) == pytest.approx((0.2, 0.2 - half, 0.2 + half), abs=1e-3)
    assert plot.low_high == pytest.approx((0.2 - half, 5.0), abs=1e-3)


def test_the_figure_of_differences_ends_where_the_shorter_run_does(two):
    """After 60 steps the baseline, not evaluated there, is at 9 - 0.6 * 5 = 6 by its line."""
    for seed in range(2):
        start, *_, end = rows_of(100, seed, every=100)
        write_run(two, "flat", seed, rows=[at(start, 9.0), at(end, 4.0)])
        start, *_, end = rows_of(60, seed, every=60)
        write_run(two, "fall", seed, rows=[at(start, 9.0), at(end, 9.0)], more=SLW)
    comparison = compare(read_valid_runs([*two.glob("flat-*"), *two.glob("fall-*")])[0])
    plot = next(plot for plot in plots_of(comparison) if plot.name == "difference")
    start, last = plot.curves.itertuples()
    assert (start.y, last.y) == pytest.approx((0.0, 3.0))


def test_a_mean_curve_ends_where_its_first_finished_run_does(two):
    """Seeds at 3 and 5 nats, a step in 0.1 and in 0.2 s: 4 until the first ends after 10 s, never 5
    alone. The third, which diverged after 6 s, cuts nothing."""
    for seed, loss, seconds in ((0, 3.0, 0.1), (1, 5.0, 0.2)):
        rows = [
            at(row, loss) | {"train_seconds": row["step"] * seconds} for row in rows_of(100, seed)
        ]
        write_run(two, "flat", seed, rows=rows)
    rows = [at(row, 4.0) | {"train_seconds": row["step"] * 0.2} for row in rows_of(30, 2)]
    write_run(two, "flat", 2, rows=rows, **DEAD)
    comparison = compare(read_valid_runs([*two.glob("flat-*")])[0])
    plot = next(plot for plot in plots_of(comparison) if plot.name == "loss-seconds")
    assert set(plot.curves.y) == {4.0}
    assert plot.curves.x.max() == pytest.approx(10.0)


def test_the_axis_of_flops_counts_as_the_tables_do(two):
    comparison = compare(read_valid_runs([two / "small-seed0"])[0])
    plots = {plot.name: plot for plot in plots_of(comparison)}
    assert [plots["loss-flops"].tick(flops) for flops in (0, 2.5e9, 5e18)] == ["0", "2.5 G", "5 E"]
    assert plots["loss-tokens"].tick(2.5e9) == "2.5B"


def at(row: dict[str, Any], loss: float) -> dict[str, Any]:
    """A row whose validation loss, if it has one, is `loss`."""
    return row | {"val_loss": None if row["val_loss"] is None else loss}


def test_no_text_of_a_figure_is_cut_off():
    """Eight names below each other, a long axis, and powers of ten as plain numbers."""
    labels = [f"{letter(i)} start 8, {10 * i} steps: unstable at step 100" for i in range(8)]
    curves = [curve(i, label, [1.0, 2.0], [1.0, 1e3]) for i, label in enumerate(labels)]
    title = "probes; dotted: unstable above 1.3, and\nthe end of the learning-rate warmup (step 60)"
    axis = "validation perplexity (full length) / its best so far"
    figure = draw_figure([Plot("probes", title, pd.concat(curves), "step", axis, log="y")])
    figure.draw_without_rendering()
    (axes,) = figure.axes
    assert axes.bbox.height > 150
    assert {text.get_text() for text in axes.get_yticklabels()} >= {"1", "10", "100", "1000"}
    texts = [axes.title, axes.yaxis.label, *figure.legends[0].get_texts()]
    for box in (text.get_window_extent() for text in texts):
        assert box.x0 >= 0 and box.x1 <= figure.bbox.width, box
        assert box.y0 >= 0 and box.y1 <= figure.bbox.height, box


def test_every_curve_of_a_figure_can_be_told_from_the_others():
    """Seven colours and markers; from the eighth curve on, colour, style and marker together."""
    ticks = {1.0: "1", 2.0: "2"}
    curves = [curve(i, letter(i), [1.0, 2.0], [1.0, 2.0]) for i in range(14)]
    (axes,) = draw_figure([Plot("r", "r", pd.concat(curves), "x", "y", ticks=ticks)]).axes
    looks = []
    for line in axes.lines:
        dashes = str(line._dash_pattern)  # get_linestyle calls every tuple "--"
        looks.append((line.get_color(), dashes, line.get_marker()))
    assert [len(set(of_seven)) for of_seven in zip(*looks[:7], strict=True)] == [7, 7, 7]
    assert len({look[:2] for look in looks}) == 14


def test_the_names_of_a_terminal_plot_break_between_words():
    labels = [f"{letter(i)} start 8, {10 * i} steps: stable" for i in range(4)]
    curves = [curve(i, label, [1.0, 2.0], [1.0, 2.0]) for i, label in enumerate(labels)]
    drawn = draw_in_terminal(Plot("probes", "probes", pd.concat(curves), "step", "loss"), 60)
    assert max(map(len, drawn.splitlines())) == 60
    assert " ".join(drawn.splitlines()).endswith(", ".join(labels))


def test_every_recipe_has_one_letter_in_tables_and_plots(two):
    groups = tuple(Group(f"recipe {i}", ()) for i in range(60))
    comparison = replace(compare(read_valid_runs([two / "small-seed0"])[0]), groups=groups)
    letters = [comparison.letter(group) for group in groups]
    assert letters == [letter(i) for i in range(60)] and len(set(letters)) == 60
    assert [letters[i] for i in (0, 25, 26, 51, 52)] == ["A", "Z", "a", "z", "R53"]


def test_no_curve_hides_another_in_the_terminal(two):
    """The same losses under two names: both letters are drawn, in turn."""
    for seed in range(3):
        write_run(two, "again", seed)
    out = run("small", "again", "--plot").stdout
    drawn = "".join(re.findall("[│┤](.*)│", out))
    a, b = drawn.count("A"), drawn.count("B")
    assert min(a, b) > 50 and max(a, b) < 2 * min(a, b)


def test_plan(two):
    out = run("small", "small-slw", "--plan", "--difference", "0.03").stdout
    assert "0.03" in out and "power 80 %" in out


def test_price_and_power(two):
    out = run(
        "small",
        "small-slw",
        "--target-loss",
        "3.3",
        "--price-per-hour",
        "3",
        "--power-watts",
        "300",
        "--details",
    ).stdout
    assert "price at 3 per hour" in out and "energy at 300 W, kWh" in out


def test_refusals_exit_with_2_and_one_message(efftrain, two):
    """F49. The fixture's own folder of runs is the same one."""
    write_run(two, "odd", 0, data={"valid_hash": "e" * 64}, lr=5e-3)
    refused = efftrain("compare", "small", "odd", code=2)
    assert refused.returncode == 2 and refused.stdout == ""
    assert refused.stderr.startswith("error: these runs cannot be compared fairly")
    assert "\n  leave out one side of each line" in refused.stderr
    assert "Traceback" not in refused.stderr
    allowed = efftrain("compare", "small", "odd", "--allow")
    assert (
        allowed.returncode == 0 and "NOT COMPARABLE: the validation text differs" in allowed.stdout
    )
    unknown = efftrain("compare", "nothing", code=2)
    assert unknown.stderr.endswith("\n  `efftrain runs list` shows all runs\n")
    efftrain("compare", "small", "-o", "no/such/folder", code=2)


def test_a_reader_that_leaves_is_no_failure(two):
    """F42."""
    script = (
        f"{sys.executable} -m efftrain_cli compare small small-slw | head -1; exit"
        " ${PIPESTATUS[0]}"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent)}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith(
        "B small-slw is better than A small"
    )


@pytest.mark.parametrize("kind", ["table", "json", "html"])
def test_a_comparison_that_does_not_fit_leaves_the_earlier_file(two, tmp_path, kind):
    """As under `ulimit -f`: the file of before is as it was, nothing half-written lies beside it; a
    link stays one."""
    (tmp_path / "earlier").write_text("earlier")
    (tmp_path / "link").symlink_to("earlier")
    before, limits = sorted(tmp_path.iterdir()), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(DiskError, match="earlier: File too large"):
            run("small", "small-slw", "--format", kind, "-o", "link")
        with pytest.raises(DiskError, match=r"figures/.*: File too large"):
            run("small", "small-slw", "--figures", "figures")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list((tmp_path / "figures").iterdir()) == []
    (tmp_path / "figures").rmdir()
    assert (tmp_path / "earlier").read_text() == "earlier" and sorted(tmp_path.iterdir()) == before
    run("small", "small-slw", "--format", kind, "-o", "link")
    assert len((tmp_path / "earlier").read_text()) > 1000 and (tmp_path / "link").is_symlink()


def test_a_full_disk_is_exit_6_and_a_device_takes_a_comparison(efftrain, two):
    full = efftrain("compare", "small", "small-slw", "--format", "csv", "-o", "/dev/full", code=6)
    assert (
        full.returncode == 6
        and "/dev/full: the disk is full" in full.stderr
        and "Traceback" not in full.stderr
    )
    run("small", "small-slw", "--format", "csv", "-o", "/dev/null")


def test_newer_format_is_refused(two):
    """F52."""
    write_run(two, "newer", 0, origin={"schema_version": 99})
    with pytest.raises(Exception, match="is newer: update efftrain"):
        run("newer")


def test_registering_the_command_imports_nothing_heavy():
    code = (
        "import sys; from efftrain_cli.cli.commands import register; register(); bad = {'torch',"
        " 'pandas', 'matplotlib', 'scipy', 'wandb', 'pyarrow'}"
    )
    script = f"{code} & set(sys.modules); assert not bad, bad"
    python(script)


class Screen(StringIO):
    """What a terminal shows."""

    def isatty(self) -> bool:
        return True


def drawn(tables: Sequence[Table], width: int) -> list[str]:
    """The lines of tables in a terminal of so many columns."""
    out = Screen()
    console = Console(file=out, width=width, force_terminal=True, no_color=True, highlight=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        print_tables(console, tables)
    text = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    return [line.rstrip() for line in text.splitlines()]


def test_a_title_is_text_and_no_markup():
    assert drawn([Table("a [b] c", ("", "x"), (("y", "1"),))], 60)[0] == "a [b] c"


def test_a_first_column_wraps_between_words():
    rows = [("steps with a loss ratio above 1.2, %", "0.00", "0.00")]
    lines = drawn([Table("", ("", "A", "B"), rows)], 33)
    assert lines[2:4] == ["steps with a loss ratio 0.00 0.00", "above 1.2, %"]


def test_a_short_last_column_is_not_wrapped():
    rows = [("steps with a loss ratio above 1.2, %", "1.063 ± 0.011", "1.063 ± 0.02")]
    lines = drawn([Table("", ("", "A", "B"), rows)], 36)
    assert lines[2] == "steps     1.063 ± 0.011 1.063 ± 0.02"


@pytest.mark.parametrize(
    "mean, unit, axis, sd, text",
    [
        (60.22, "", "", 0.512, "60.22 ± 0.51"),
        (2.1281, "", "seconds", 0.42494, "2.128 s ± 0.42 s"),
        (7891.0, "", "", 1435.2, "7891 ± 1400"),
        (6.0652, "nats/token", "", 0.12345, "6.0652 ± 0.1235"),
        (52.125, "%", "", 3.456, "52.12 ± 3.46"),
    ],
)
def test_a_spread_has_two_digits_or_the_decimals_of_its_unit(mean, unit, axis, sd, text):
    assert format_number(mean, unit, axis, sd) == text


def test_the_table_of_runs_names_recipes_by_their_letters(two):
    """A mark is a line below the tables, and no column."""
    write_run(two, "small", 3, events=[{"event": "start"}, {"event": "resume"}])
    *_, runs = tables_of(compare(read_valid_runs(select_runs(["small", "small-slw"]))[0]))
    assert runs.header == ("run", "recipe", "seed", "status", "tokens")
    assert runs.rows[3] == ("small-seed3", "A", "3", "finished", "102.4K")
    assert runs.rows[-1] == ("small-slw-seed2", "B", "2", "finished", "102.4K")
    assert "note: small-seed3: resumed 1 time\n" in run("small", "small-slw", "--details").stdout


@pytest.mark.parametrize("width", [40, 60])
def test_a_narrow_terminal_stacks_and_leaves_nothing_out(two, width):
    runs, _ = read_valid_runs(select_runs(["small", "small-slw"]))
    lines = drawn(tables_of(compare(runs), details=False), width)
    assert all(len(line) <= width for line in lines if "`" not in line)
    i = lines.index("final loss")
    assert lines[i + 1].startswith("  A 3.2") and lines[i + 2].startswith("  B 3.1")
    assert "B against A [95 %] -0.1" in " ".join(lines[i + 3 : i + 5])
    assert "verdict better" in " ".join(lines)


def test_three_recipes_fit_80_columns_with_a_failure_among_them(two):
    """As a table at 80 columns, one line per recipe and question; stacked at 60, with no line of
    nothing."""
    for seed in range(3):
        write_run(two, "bad", seed, **DEAD)
    table = answers(compare(read_valid_runs(select_runs(["small", "small-slw", "bad"]))[0]))
    for width in (80, 60):
        lines = drawn([table], width)
        assert all(len(line) <= width for line in lines if "`" not in line)
        row = re.compile(" +C 0 of 3 runs +ahead in 0 % of pairs ")
        assert any(map(row.match, lines)) == (width == 80)
        notes = next(i for i, line in enumerate(lines) if line.startswith("Losses"))
        assert "" not in lines[:notes]


def test_only_questions_with_a_verdict_are_answered_for_three_recipes(two):
    for seed in range(3):
        write_run(two, "slower", seed, speed=0.9, more=SLW)
    runs = read_valid_runs(select_runs(["small", "small-slw", "slower"]))[0]
    titles = [row[0] for row in answers(compare(runs)).rows if row[0]]
    assert titles == ["final loss", "tokens to match", "FLOPs to match", "seconds to match"]


def test_a_narrow_terminal_indents_the_cells_of_each_recipe(two):
    for seed in range(3):
        write_run(two, "bad", seed, **DEAD)
    table = answers(compare(read_valid_runs(select_runs(["small", "small-slw", "bad"]))[0]))
    lines = drawn([table], 60)
    i = lines.index("runs that diverged")
    shown = ["  A", "    mean 0 of 3", "  B", "    mean 0 of 3", "  C", "    mean 3 of 3"]
    assert lines[i + 1 : i + 8] == [*shown, "    verdict too few"]


def test_a_reason_names_the_recipes_that_it_is_about(two):
    for seed in range(3):
        write_run(two, "bad", seed, **DEAD)
    out = run("small", "small-slw", "bad").stdout
    assert "\nseconds to match (B, C): not judged: by these machines' clocks.\n" in out
    few = "tokens to match (C), FLOPs to match (C), runs that diverged (C): undecided: so few runs"
    assert f"\n{few} cannot give p below 0.1.\n" in out
    (sentence,) = [line for line in out.splitlines() if line.startswith("C bad against")]
    assert sentence.count("0.1;") == 1 and sentence.endswith("; Fisher's exact test.")


def test_no_line_breaks_an_interval(two):
    shown = on_terminal(two.parent, 60, "compare", "small", "small-slw").splitlines()
    assert re.fullmatch(r"B small-slw is better than A small in final loss: -0\.\d{4}", shown[0])
    assert re.match(r"\[-0\.\d{4}, -0\.\d{4}\] nats/token, p ", shown[1])


@pytest.mark.parametrize(
    ("words", "fault", "fix"),
    [
        ((), "compare needs runs, recipes or a study", "name some of `efftrain runs list`, or"),
        (("small", "--margin", "0"), "--margin 0 is no loss", "give nats per token, above 0"),
        (
            ("small", "small-slw", "--baseline", "no"),
            "--baseline 'no' is not one of the recipes compared",
            "choose one of 'small', 'small-slw'",
        ),
        *[
            (
                ("small", "small-slw", "--difference", size),
                f"--difference {size} is not a size above 0",
                "give nats per token, or a share of cost",
            )
            for size in ("-1", "nan", "inf")
        ],
        (
            ("small", "--plan"),
            "--plan needs the runs of two recipes: their differences have the spread",
            "name runs of a second recipe",
        ),
        (
            ("small", "--study", "s.toml"),
            "--study FILE names the runs and the baseline itself",
            "leave out RUN... and --baseline",
        ),
    ],
)
def test_the_fix_is_on_the_line_below_the_fault(two, words, fault, fix):
    with pytest.raises(UsageError) as refused:
        run(*words)
    first, second = str(refused.value).split("\n")
    assert first == fault and second.startswith(f"  {fix}")


@pytest.mark.parametrize("as_paths", [False, True])
def test_what_was_chosen_after_the_runs_stands_in_one_line(two, as_paths):
    write_run(two, "small", 7)
    seeds = [f"{name}-seed{seed}" for name in ("small", "small-slw") for seed in range(2)]
    if as_paths:
        seeds = [str(two / ".." / two.name / seed) for seed in seeds]
    out = run(*seeds, "--margin", "0.01", "--target-loss", "3.5").stdout
    (line,) = [line for line in out.splitlines() if line.startswith("Exploratory: ")]
    assert (
        line
        == "Exploratory: nothing was fixed before the runs; the target loss was chosen now (the"
        " best of 15 errs in 9 to 15 % of studies); the margin was chosen now; runs left out or"
        " removed: 2 of small, 1 of small-slw."
    )
