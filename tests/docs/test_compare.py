"""docs/compare.md: its commands run, and its numbers agree with each other and with the
simulations' table."""

from __future__ import annotations

import ast
import csv
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from efftrain_cli.cli.app import app
from tests.conftest import REPOSITORY
from tests.fake_runs import write_run

TEXT = (REPOSITORY / "docs" / "compare.md").read_text(encoding="utf-8")
BLOCKS = "".join(re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL))
INLINE = re.findall(r"`(efftrain [^`]+)`", TEXT.replace("\n", " "))
COMMANDS = [line for line in BLOCKS.splitlines() if line.startswith("efftrain ")] + [
    command for command in INLINE if " --" in command and "FILE" not in command
]
(OUTPUT,) = re.findall(r"```text\n(.*?)```", TEXT, re.DOTALL)
WARMUP = "\n[seq_len_warmup]\nstart = 32\nsteps = 10\n"


def test_the_page_has_commands():
    assert len(COMMANDS) >= 6


def run(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three seeds of each recipe that the page names."""
    monkeypatch.setenv("EFFTRAIN_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    for seed in range(3):
        write_run(tmp_path / "runs", "quickstart", seed)
        write_run(tmp_path / "runs", "quickstart-slw", seed, speed=1.3, more=WARMUP)
    return tmp_path / "runs"


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command, runs):
    words = shlex.split(command, comments=True)[1:]
    if words[0] == "sweep":  # its plan: training is tested elsewhere
        for recipe in runs.glob("*/recipe.toml"):
            recipe.unlink()
        words.append("--plan")
    run(*words)


def test_the_output_has_the_form_that_compare_prints(runs):
    """The opening of made-up runs and the heads of their tables are those on the page."""
    for text in (run("compare", "quickstart", "quickstart-slw"), OUTPUT):
        flat = re.sub(r"\s+", " ", text)
        assert flat.startswith(
            ("B quickstart-slw is ", "B quickstart-slw against A quickstart is ")
        )
        assert " Exploratory: nothing was fixed before the runs. recipe seeds settings " in flat
        assert " A B B against A [95 %] p verdict " in flat
        assert " Losses in nats/token, B - A; costs as ratios A / B, above 1 is better. " in flat


def test_the_numbers_of_the_output_agree():
    """The sentence is of the table's first line, whose difference is B - A to the last digit and in
    its interval."""
    (line,) = [line for line in OUTPUT.splitlines() if line.startswith("final loss ")]
    a, b, gap, low, high = map(float, re.findall(r"[-+]?\d+\.\d{4}", line))
    assert gap == pytest.approx(b - a, abs=1.01e-4) and low < gap < high
    sentence = re.sub(r"\s+", " ", OUTPUT)[:160]
    assert f"in final loss: {gap:+.4f} [{low:+.4f}, {high:+.4f}] nats/token, p = " in sentence
    assert ("undecided" in sentence) == (low < 0 < high)
    ratios = re.findall(r"(\d\.\d\d)x \[(\d\.\d\d), (\d\.\d\d)\]", OUTPUT)
    assert len(ratios) == 4
    for ratio in ratios:
        middle, least, most = map(float, ratio)
        # On the logarithm's scale the interval is symmetric.
        assert middle == pytest.approx((least * most) ** 0.5, abs=0.012)


RULES = {
    "outcome": [("jitter", "final loss, n = "), ("margins", '"equivalent".*truly 0.02 worse')],
    "pairs": [("pairs", "final loss, ")],
    "failed and stuck runs": [("failures", r"(diverge|get stuck), final loss, n = ")],
    "cost to match": [("jitter", "cost to match, n = ")],
    "cost to target": [("jitter", "cost to a fixed target, n = ")],
    "zero-shot scores": [("zeroshot", "any winner, corrected")],
    "several settings": [
        ("tuning", "best of 5 and 5 settings"),
        ("tuning", "best of 1 and 5 settings"),
    ],
}
"""Rule -> the rows of the table that measure it, as (part, what is true and judged)."""
TABLE = REPOSITORY / "benchmarks" / "simulations" / "compare.csv"


@pytest.mark.parametrize("rule", RULES)
def test_a_rules_error_is_that_of_its_rows(rule):
    rules = TEXT[TEXT.index("## The rules") :].splitlines()
    line = next(line for line in rules if line.startswith(f"| {rule} |"))
    with TABLE.open(encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    for part, pattern in RULES[rule]:
        rates = []
        for row in table:
            what = f"{row['what is true']}, {row['what is judged']}"
            if row["part"] == part and re.search(pattern, what):
                rates.append(float(row["how often"].removesuffix(" %")))
        text = f"{min(rates):.1f} to {max(rates):.1f} %" if len(rates) > 1 else f"{rates[0]:.1f} %"
        assert text in line, (text, pattern)


def test_every_part_that_is_named_is_one_of_the_simulations():
    source = (REPOSITORY / "benchmarks" / "simulations" / "simulate_compare.py").read_text()
    (parts,) = re.findall(r"\nPARTS = (\{.*?\n\})", source, re.DOTALL)
    names = {key.value for key in ast.parse(parts, mode="eval").body.keys}
    rules = TEXT[TEXT.index("## The rules") : TEXT.index("Details of some rules")]
    named = set(re.findall(r"% (?:at the margin's border )?\(([a-z]+)\)", rules))
    named |= set(re.findall(r"\| ([a-z]+) \|$", TEXT[TEXT.index("## How often") :], re.MULTILINE))
    assert len(named) >= 12 and named <= names
    with TABLE.open(encoding="utf-8") as file:
        assert {row["part"] for row in csv.DictReader(file)} == names
