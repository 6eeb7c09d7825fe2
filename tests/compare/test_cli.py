"""`efftrain compare`: its screen, its formats, its exit status."""

from __future__ import annotations

import io
import json
import math
import resource
from dataclasses import replace

import pandas as pd
import pytest
from matplotlib.colors import to_rgba_array
from typer import Exit

from efftrain_cli.cli.judged import end_with_verdict, write_output
from efftrain_cli.compare import figures
from efftrain_cli.compare.arms import group_runs
from efftrain_cli.compare.comparison import compare
from efftrain_cli.compare.judge import claim_of
from efftrain_cli.compare.show import render
from efftrain_cli.foundation.errors import DiskError, UsageError
from tests.compare.known_runs import of, row_of, write_pair
from tests.compare.runs import make_arm, make_run
from tests.conftest import cli, invoke
from tests.fake_runs import write_run

WORDS = ("compare", "small-slw", "small")


PAIRS = """\
small-slw is better than small in final loss: -0.1308 [-0.1376, -0.1240] nats/token; p = 0.00015;\
 3 pairs.

             final loss  tokens to match  FLOPs to match  time
  small          3.2447                                    5 s
+ small-slw      3.1139  at least 1.28x   at least 1.28x   5 s
note: exploratory: nothing was fixed before these runs
"""
PAIR = """\
small-slw against small is not judged in final loss: -0.1282 nats/token; 1 pair;\
 one seed supports no claim.

             final loss  time
  small          3.2385   5 s
  small-slw      3.1103   5 s
note: exploratory: nothing was fixed before these runs
next: efftrain race small small-slw (6 to 16 runs)
"""


@pytest.mark.parametrize(("seeds", "screen", "code"), [(3, PAIRS, 0), (1, PAIR, 11)])
def test_the_screen_begins_with_the_answer(root, seeds, screen, code):
    """The numbers of three pairs are those of the record "3 pairs"."""
    write_pair(root, seeds)
    answer = invoke(*WORDS, "--fail-if", "worse")
    assert (answer.stdout, answer.exit_code) == (screen, code)


DETAILS = """\
arm is equivalent to base within 0.05 in final loss: +0.0025 [-0.0088, +0.0138] (90 %) nats/token;\
 p = 0.0022; 4 pairs.
slow is worse than base in final loss: +0.5000 [+0.4870, +0.5130] nats/token;\
 p = 2.4e-06; 4 pairs.
arm made 202K instead of 103K updates.

        final loss  tokens to match  FLOPs to match         time
  base      4.1500                                   16 min 40 s
= arm       4.1525  not told apart   not told apart  16 min 40 s
- slow      4.6500  at most 0.75x    at most 0.75x   16 min 40 s

measure           arm   baseline    mean  difference [95 %]                         p  verdict
final loss        arm     4.1500  4.1525  +0.0025 [-0.0088, +0.0138] (90 %)    0.0022  equivalent
                  slow    4.1500  4.6500  +0.5000 [+0.4870, +0.5130]          2.4e-06  worse
tokens to match   arm                     0.999x [0.990x, 1.007x]
                  slow                    0.729x [0.703x, 0.755x]
FLOPs to match    arm                     0.999x [0.990x, 1.007x]
                  slow                    0.729x [0.703x, 0.755x]
seconds to match  arm                     0.999x [0.990x, 1.007x]
                  slow                    0.729x [0.703x, 0.755x]
updates           arm       103K    202K  +9.85e+04 [+9.645e+04, +1.006e+05]
                  slow      103K          not recorded

setting  base  arm  slow
label    base  arm  slow

arm   seed  run         status    step  tokens  flops  seconds  val_loss
base     0  base-seed0  finished   100   1,000  6,000    1,000         4
         1  base-seed1  finished   100   1,000  6,000    1,000       4.1
         2  base-seed2  finished   100   1,000  6,000    1,000       4.2
         3  base-seed3  finished   100   1,000  6,000    1,000       4.3
arm      0  arm-seed0   finished   100   1,000  6,000    1,000      4.01
         1  arm-seed1   finished   100   1,000  6,000    1,000       4.1
         2  arm-seed2   finished   100   1,000  6,000    1,000      4.21
         3  arm-seed3   finished   100   1,000  6,000    1,000      4.29
slow     0  slow-seed0  finished   100   1,000  6,000    1,000       4.5
         1  slow-seed1  finished   100   1,000  6,000    1,000      4.61
         2  slow-seed2  finished   100   1,000  6,000    1,000       4.7
         3  slow-seed3  finished   100   1,000  6,000    1,000      4.79
note: one
note: two
note: three
note: four
note: five"""


def test_details_in_full():
    """The values are those of scipy's tests of the differences and of the logarithms of the costs;
    each p is doubled, as there are two claims."""
    runs = []
    for arm, finals, updates in (
        ("base", [4.0, 4.1, 4.2, 4.3], [100e3, 102e3, 104e3, 106e3]),
        ("arm", [4.01, 4.1, 4.21, 4.29], [200e3, 201e3, 202e3, 203e3]),
        ("slow", [4.5, 4.61, 4.7, 4.79], [math.nan] * 4),
    ):
        for run, value in zip(make_arm(arm, finals), updates, strict=True):
            notes = ("one", "two", "three", "four", "five")
            runs.append(replace(run, facts={"updates": value}, notes=notes))
    comparison = compare(runs, baseline="base", claims=[claim_of(0.05)])
    assert render(comparison, "table", details=True) == DETAILS
    *screen, last = render(comparison, "table").splitlines()
    assert DETAILS.startswith("\n".join(screen[:8]))
    assert screen[8:] == [f"note: {number}" for number in ("one", "two", "three", "four")]
    assert last == "note: 1 more: --details"
    colours = figures.colours_of(comparison.arms)
    (axes,) = figures.differences_figure(comparison.rows, colours).axes
    bars = [bar.get_segments()[0][:, 1].round(4).tolist() for bar in axes.collections]
    assert bars == [[-0.0127, 0.0177], [0.487, 0.513]]


PLOT = """\
                  validation loss (nats/token)
    ┌──────────────────────────────────────────────────────┐
5.91┤ ABBB BBB                                             │
    │     AA  A BBB BBB                                    │
5.57┤         AA        BBB BBB                            │
    │             AAA         B  BBB BB                    │
    │                 AAA             BB BBB BB            │
5.24┤                     AAA                 BB  BBB B    │
    │                          AA                     BBB  │
4.90┤                              AAA                     │
    │                                  AAA                 │
4.57┤                                      AAA             │
    │                                           AA         │
    │                                               AA     │
4.23┤                                                 A AA │
    │                                                     A│
3.90┤                                                      │
    └┬────────────┬─────────────┬────────────┬────────────┬┘
     0           250           500          750       1,000
                             tokens
A two (2 seeds), B three (2 seeds)"""


def test_a_curve_is_the_mean_and_range_of_seeds():
    """The losses fall from 6 to 4.0 and 4.2, and to 5.0 and 5.1; one arm has no curve. The first of
    200 points that counts for the height is the 21st, where the highest loss is 5.91."""
    runs = [make_run("one", 0, [5.0]), *make_arm("two", [4.0, 4.2]), *make_arm("three", [5.0, 5.1])]
    figure = figures.curves_figure(group_runs(runs), "tokens")
    (axes,) = figure.axes
    two, _ = axes.get_lines()
    assert two.get_xydata()[-1] == pytest.approx([1000, 4.1])
    band = axes.collections[0].get_paths()[0].vertices
    assert {*band[band[:, 0] == 1000][:, 1].round(9)} == {4.0, 4.2}
    assert axes.get_ylim()[1] == pytest.approx(6 - 0.9 * 20 / 199)
    shown = figures.draw_in_terminal(figure, 60).splitlines()
    assert [line.rstrip() for line in shown] == PLOT.splitlines()


def test_details_and_a_plot_of_runs(root):
    write_pair(root)
    text = cli(*WORDS, "--details", "--plot").stdout
    assert "validation jumps" in text
    assert text.rstrip().endswith("A small (3 seeds), B small-slw (3 seeds)")


def test_zero_shot_scores_are_rows_without_p(root):
    write_pair(root)
    for name, score in (("small", 0.2), ("small-slw", 0.25)):
        for seed in range(3):
            entry = {
                "schema_version": 1,
                "checkpoint": "step-00000100",
                "checkpoint_sha256": f"{name}{seed}",
                "task": "hellaswag",
                "protocol": "harness",
                "limit": None,
                "tokens": 102400,
                "metrics": {"acc": {"value": score + seed / 100}},
            }
            (root / f"{name}-seed{seed}" / "zeroshot.json").write_text(json.dumps([entry]))
    row = row_of(of("small", "small-slw"), "hellaswag acc (harness, 102K tokens)")
    assert row.estimate == pytest.approx(0.05) and row.direction == "" and row.verdict == ""


def test_other_formats_hold_the_same_numbers(root):
    write_pair(root)
    comparison = of("small", "small-slw")
    values = json.loads(render(comparison, "json"))
    assert set(values) >= {"schema_version", "sentences", "caveats", "gains", "settings", "runs"}
    frame = pd.read_csv(io.StringIO(render(comparison, "csv")), keep_default_na=False)
    assert frame.columns[0] == "measure" and list(frame.measure) == [
        row["measure"] for row in values["results"]
    ]
    loss = values["results"][0]
    assert float(frame.estimate[0]) == pytest.approx(loss["estimate"], rel=1e-12)
    assert loss["verdict"] == "better" and loss["p"] == pytest.approx(0.000146832718, rel=1e-6)
    assert render(comparison, "markdown").startswith("| measure")
    latex = render(comparison, "latex")
    assert r"\begin{tabular}{lllllll}" in latex and r"difference [95 \%]" in latex


def test_html_is_one_page_with_curves(root, monkeypatch):
    monkeypatch.setattr(figures, "DRAWN", figures.DRAWN[2:3])
    write_pair(root)
    path = root / "report.html"
    cli(*WORDS, "--format", "html", "-o", str(path))
    page = path.read_text()
    assert (
        page.count("<table") == 4
        and "<th>0</th>" not in page
        and "small-slw is better than small" in page
    )
    assert page.count("<svg") == 5
    for cost in ("tokens", "FLOPs", "seconds"):
        assert f">Validation loss against {cost}: mean and range of seeds<" in page
    assert ">Final loss less the baseline" in page and ">Learning rate<" in page


def test_an_arm_has_one_colour_in_all_figures(root, monkeypatch):
    monkeypatch.setattr(figures, "DRAWN", figures.DRAWN[:1])
    write_pair(root)
    write_run(root, "small", 0, name="small-fast-seed0", lr=2e-3)
    colours: dict[str, set[bytes]] = {"small": set(), "small-slw": set()}
    for figure in of("small", "small-slw").figures():
        (legend,) = figure.legends
        for text, line in zip(legend.get_texts(), legend.legend_handles, strict=True):
            name = text.get_text().partition(" (")[0]
            colours[name].add(to_rgba_array(line.get_color()).tobytes())
    assert [len(each) for each in colours.values()] == [1, 1]


@pytest.mark.parametrize(
    ("gain", "fail_if", "margin", "code"),
    [
        (0.1, "not-better", 0.0, 0),
        (-0.1, "worse", 0.0, 10),
        (0.0, "worse", 0.0, 0),
        (0.0, "not-better", 0.0, 10),
        (0.0, "worse", 0.001, 10),
        (0.0, "worse", 0.1, 0),
    ],
)
def test_exit_status(gain, fail_if, margin, code):
    """Differences of the pairs have a mean of -gain and a standard deviation of 0.01."""
    base = make_arm("base", [4.0, 4.1, 4.2])
    arm = make_arm("arm", [3.99 - gain, 4.1 - gain, 4.21 - gain])
    comparison = compare([*base, *arm], baseline="base", claims=[claim_of(margin)])
    try:
        end_with_verdict(comparison, fail_if)
    except Exit as end:
        assert end.exit_code == code
    else:
        assert code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["small", "--from", "x.csv"], "compare needs runs or recipes, or --from FILE\n"),
        (["small", "--columns", "a=b"], "give --from FILE too"),
        (["--from", "x.csv", "--columns", "a"], "is no pair\n  write val_loss=eval/loss"),
        (["small", "--maximize"], "--maximize is for values of a table"),
        (["small"], "a comparison needs two arms or more"),
    ],
)
def test_words_that_do_not_go_together(root, words, message):
    write_run(root, "small", 0)
    with pytest.raises(UsageError, match=message):
        cli("compare", *words)


def refuse(*_):
    """Raise an error without a number, as Python's own modules do."""
    raise OSError("not seekable")


def test_a_comparison_that_does_not_fit_leaves_the_earlier_file(tmp_path, monkeypatch):
    """As under `ulimit -f`: nothing half-written lies beside it; a link stays one."""
    earlier, link = tmp_path / "earlier", tmp_path / "link"
    earlier.write_text("earlier")
    link.symlink_to("earlier")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(DiskError, match="earlier: File too large"):
            write_output(link, "x" * 300)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert earlier.read_text() == "earlier" and len(list(tmp_path.iterdir())) == 2
    write_output(link, "later")
    assert earlier.read_text() == "later" and link.is_symlink()
    with pytest.raises(UsageError, match=r"--output .*: No such file or directory"):
        write_output(tmp_path / "none" / "report", "")
    monkeypatch.setattr("efftrain_cli.foundation.files.write_whole", refuse)
    with pytest.raises(UsageError, match=r"--output .*: not seekable"):
        write_output(earlier, "")
