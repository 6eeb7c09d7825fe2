"""Train the probes of a search, and read what they have shown from their runs."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pandas as pd

from efftrain_cli.data.prepare import limits_of, prepare
from efftrain_cli.data.windows import Windows, frequency_loss
from efftrain_cli.foundation.console import counted, human
from efftrain_cli.foundation.files import make_folder
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.run.directory import runs_in
from efftrain_cli.run.metrics import latest_rows
from efftrain_cli.run.stability import fluctuations
from efftrain_cli.run.status import ENDED
from efftrain_cli.trials.runner import TrialRunner
from efftrain_cli.trials.trial import Trial, run_name, setting_word, state_of
from efftrain_cli.tune_warmup.candidates import TuneConfig, recipe_with, tokens_of
from efftrain_cli.tune_warmup.search import BudgetError, Probe, Receipt, Setting


@dataclass(kw_only=True)
class Prober:
    """Trains what a search asks for, and keeps the receipts."""

    folder: Path
    config: TuneConfig
    receipts: dict[tuple[Setting, int], Receipt] = field(default_factory=dict)
    """By setting and seed."""

    @property
    def runs(self) -> Path:
        """Where the runs of probes are."""
        return self.folder / "probes"

    @property
    def recipe(self) -> Recipe:
        """The searched recipe."""
        return recipe_with(self.config, ())

    def see(self, probe: Probe) -> Receipt:
        """Return a probe's receipt, after training what is missing.

        Raises:
            BudgetError: it could exceed the budget.
            UsageError: its run is there with another recipe.
        """
        trial = self.trial_of(probe)
        with runs_in(self.runs):
            status = state_of(trial)
            if status not in ENDED:
                status = self.train(probe, trial)
        receipt = self.read(self.runs / trial.name, status)
        self.receipts[probe.setting, probe.seed] = receipt
        return receipt

    def trial_of(self, probe: Probe) -> Trial:
        """Return the run of a probe, of the same name for every horizon."""
        config = self.config
        recipe = self.recipe
        every = max(1, min(recipe.eval.every, recipe.optim.warmup_steps // 10))
        own = (f"eval.every={every}", "checkpoint.keep=1")
        words = [*map(setting_word, probe.setting), f"seed{probe.seed}"]
        return Trial(
            config.recipe,
            (*config.settings, *probe.setting, *own),
            probe.seed,
            run_name(words, probe.setting),
            until=probe.horizon,
            threshold=config.threshold,
        )

    def train(self, probe: Probe, trial: Trial) -> str:
        """Train a probe up to its horizon, or to its first significant fluctuation; return how it
        ended."""
        needed = tokens_of(self.config, probe)
        for key, receipt in self.receipts.items():
            if key != (probe.setting, probe.seed):
                needed += receipt.tokens
        if needed > self.config.budget:
            raise BudgetError(needed)
        make_folder(self.runs)
        (ended,) = self.runner.train([trial], f"probe {trial.name}")
        if probe.horizon > self.recipe.optim.warmup_steps:
            # Nothing asks for more.
            shutil.rmtree(self.runs / trial.name / "checkpoints", ignore_errors=True)
        return ended.status

    def read(self, run: Path, status: str) -> Receipt:
        """Return what the run of a probe has shown that ended so."""
        threshold = self.config.threshold
        rows = latest_rows(run)
        last = rows[-1]
        steps = []
        curve = []
        for row in rows:
            loss = row.get("val_loss")
            if row.get("nonfinite"):
                # The update of the step was not applied.
                loss = math.inf
            if loss is not None:
                steps.append(row["step"])
                curve.append((row["tokens"], loss))
        ratios = fluctuations([loss for _, loss in curve])
        if status == "diverged" and max(ratios) <= threshold:
            # A weight or a validation loss that is not finite is in no row.
            steps.append(last["step"] + 1)
            curve.append((last["tokens"], math.inf))
            ratios.append(math.inf)
        above = zip(steps, ratios, strict=True)
        unstable = [step for step, ratio in above if ratio > threshold]
        unigram = self.unigram_loss
        distance = curve[0][1] - unigram
        return Receipt(
            fluctuation=max(ratios),
            unstable_at=min(unstable, default=None),
            steps=last["step"],
            stuck_above=unigram - 0.05 * distance,
            curve=tuple(curve),
        )

    @cached_property
    def runner(self) -> TrialRunner:
        """What trains the probes: one for all of them, whose process has imported PyTorch."""
        config = self.config
        return TrialRunner(self.folder, device=config.device, devices=config.devices)

    @cached_property
    def unigram_loss(self) -> float:
        """Loss of the validation windows by the training text's token frequencies, nats per
        token."""
        recipe = self.recipe
        corpus = prepare(recipe.data, limits=limits_of(recipe))
        validation = Windows(corpus.valid, recipe.model.seq_len, recipe.seed)
        windows = validation.validation(recipe.eval.windows)
        return frequency_loss(corpus.train, windows, corpus.vocab_size)

    def table(self) -> str:
        """Return the receipts as CSV."""
        rows = []
        for (setting, seed), receipt in self.receipts.items():
            row = {
                "setting": " ".join(setting),
                "seed": seed,
                "steps": receipt.steps,
                "tokens": receipt.tokens,
                "fluctuation": f"{receipt.fluctuation:.4f}",
                "unstable_at": receipt.unstable_at or "",
                "loss": f"{receipt.loss:.4f}",
            }
            rows.append(row)
        return pd.DataFrame(rows).to_csv(index=False)

    def cost(self) -> str:
        """Describe what the probes have cost."""
        tokens = sum(receipt.tokens for receipt in self.receipts.values())
        share = tokens / self.recipe.train.tokens
        probes = counted(len(self.receipts), "probe")
        return f"{probes}, {human(tokens)} tokens: {100 * share:.0f} % of a run"
