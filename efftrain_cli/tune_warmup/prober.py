"""Train the probes of a search, and read what they have shown from their runs."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from efftrain_cli.foundation.console import (
    counted,
    human,
)
from efftrain_cli.foundation.files import csv_text, make_folder
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.run.directory import runs_in
from efftrain_cli.run.lines import read_lines
from efftrain_cli.run.metrics import latest_rows
from efftrain_cli.run.stability import fluctuations
from efftrain_cli.trials.runner import TrialRunner
from efftrain_cli.trials.trial import Trial, run_name, setting_word
from efftrain_cli.tune_warmup.candidates import TuneConfig, recipe_with, tokens_of
from efftrain_cli.tune_warmup.search import (
    BudgetError,
    Probe,
    Receipt,
    Setting,
)

COLUMNS = (
    "setting",
    "seed",
    "steps",
    "tokens",
    "fluctuation",
    "unstable_at",
    "loss",
)
UNIGRAM_TOKENS = 10_000_000
"""Most tokens of each text that token frequencies are counted on."""


@dataclass(kw_only=True)
class Prober:
    """Trains what a search asks for, and keeps the receipts."""

    folder: Path
    config: TuneConfig
    receipts: dict[tuple[Setting, int], Receipt] = field(default_factory=dict)
    """By setting and seed."""

    def see(self, probe: Probe) -> Receipt:
        """Return a probe's receipt, after training what is missing.

        Raises:
            BudgetError: it could exceed the budget.
        """
        key = (probe.setting, probe.seed)
        receipt = self.read(probe)
        if receipt is None or receipt.judge(probe.horizon, may_be_stuck=False) is None:
            others = {**self.receipts}
            others.pop(key, None)
            needed = tokens_of(self.config, probe)
            needed += sum(other.tokens for other in others.values())
            if needed > self.config.budget:
                raise BudgetError(needed)
            self.train(probe)
            receipt = self.read(probe)
            assert receipt is not None
        self.receipts[key] = receipt
        return receipt

    def read(self, probe: Probe) -> Receipt | None:
        """Return what a probe's run has shown; None if it was never trained."""
        path = self.folder / "probes" / name_of(probe)
        rows = latest_rows(path) if (path / "metrics.jsonl").exists() else []
        if not rows:
            return None
        points = []
        for row in rows:
            # The update of a step that is not finite was not applied.
            loss = math.inf if row.get("nonfinite") else row.get("val_loss")
            if loss is not None:
                points.append((row["step"], row["tokens"], loss))
        ratios = fluctuations([loss for _, _, loss in points])
        unstable_at = None
        for (step, _, _), ratio in zip(points, ratios, strict=True):
            if ratio > self.config.threshold:
                unstable_at = step
                break
        if unstable_at is None and _has_diverged(path):
            # A weight or a validation loss that is not finite is in no row.
            unstable_at = rows[-1]["step"] + 1
            points.append((unstable_at, rows[-1]["tokens"], math.inf))
            ratios.append(math.inf)
        first = points[0][2]
        return Receipt(
            fluctuation=max(ratios),
            unstable_at=unstable_at,
            steps=rows[-1]["step"],
            stuck_above=self.unigram_loss - 0.05 * (first - self.unigram_loss),
            curve=tuple((tokens, loss) for _, tokens, loss in points),
        )

    @cached_property
    def runner(self) -> TrialRunner:
        """What trains the probes: one for all of them, whose process has imported PyTorch."""
        return TrialRunner(self.folder, device=self.config.device, devices=self.config.devices)

    @cached_property
    def unigram_loss(self) -> float:
        """Cross-entropy of the validation text by the training text's token frequencies, nats per
        token."""
        import numpy as np

        from efftrain_cli.data.prepare import limits_of, prepare

        recipe = recipe_with(self.config, ())
        corpus = prepare(recipe.data, limits=limits_of(recipe))
        counts = []
        for side in (corpus.train, corpus.valid):
            tokens = side.read([0], min(side.tokens, UNIGRAM_TOKENS))[0]
            counts.append(np.bincount(tokens, minlength=corpus.vocab_size))
        train, valid = counts
        # One more of each token: the validation text may have some that training has not.
        losses = -np.log((train + 1) / (train + 1).sum())
        return float(valid @ losses / valid.sum())

    def train(self, probe: Probe) -> None:
        """Train a probe up to its horizon, or to its first significant fluctuation."""
        recipe = recipe_with(self.config, ())
        climb = recipe.optim.warmup_steps
        every = max(1, min(recipe.eval.every, climb // 10))
        own = (f"eval.every={every}", "checkpoint.keep=1")
        name = name_of(probe)
        trial = Trial(
            self.config.recipe,
            (*self.config.settings, *probe.setting, *own),
            probe.seed,
            name,
            until=probe.horizon,
            threshold=self.config.threshold,
        )
        folder = self.folder / "probes"
        make_folder(folder)
        if not (folder / name / "checkpoints").exists():
            shutil.rmtree(folder / name, ignore_errors=True)  # it ended, and begins again
        with runs_in(folder):
            self.runner.train([trial], f"probe {name}")
        if probe.horizon > climb:  # nothing asks for more
            shutil.rmtree(folder / name / "checkpoints", ignore_errors=True)

    def table(self) -> str:
        """Return the receipts as CSV."""
        rows = []
        for (setting, seed), receipt in self.receipts.items():
            row = (
                " ".join(setting),
                seed,
                receipt.steps,
                receipt.tokens,
                f"{receipt.fluctuation:.4f}",
                receipt.unstable_at or "",
                f"{receipt.loss:.4f}",
            )
            rows.append(row)
        return csv_text(COLUMNS, rows)

    def cost(self, recipe: Recipe) -> str:
        """Describe what the probes have cost."""
        tokens = sum(receipt.tokens for receipt in self.receipts.values())
        share = tokens / recipe.train.tokens
        probes = counted(len(self.receipts), "probe")
        return f"{probes}, {human(tokens)} tokens: {share:.0%} of a run"


def _has_diverged(run: Path) -> bool:
    """Return whether a run has reported a divergence."""
    return any(event.get("event") == "diverged" for event in read_lines(run / "events.jsonl"))


def name_of(probe: Probe) -> str:
    """Return the name of a probe's run: the same for every horizon."""
    words = [setting_word(*text.split("=", 1)) for text in probe.setting]
    return run_name([*words, f"seed{probe.seed}"], probe.setting)
