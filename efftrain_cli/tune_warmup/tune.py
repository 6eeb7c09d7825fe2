"""`efftrain tune-warmup`: find a warmup by short probes instead of full runs.

    runs/<name>/
      search.toml              the recipe that is searched
      probes/<setting>-seedN/  a run for each probe
      receipts.csv             every probe: steps, tokens, largest fluctuation, loss
    recipes/<recipe>-tuned.toml  the recipe with the warmup that was found

A probe's receipt is read from its run. So the same command continues a search that was killed, and
one that ran out of budget continues with a larger one.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

from efftrain_cli.foundation.console import (
    counted,
    human,
    make_console,
    print_labelled,
    say,
    steady_output,
)
from efftrain_cli.foundation.errors import DivergedError, UsageError
from efftrain_cli.foundation.files import csv_text, make_folder, write_whole
from efftrain_cli.plan.preview import summarize_plan
from efftrain_cli.recipe.draft import Draft, apply_override, is_path, recipe_name
from efftrain_cli.recipe.recipe import Recipe, dump_recipe, load_recipe
from efftrain_cli.recipe.toml import toml_lines
from efftrain_cli.run.directory import run_path, runs_in
from efftrain_cli.run.lines import read_lines
from efftrain_cli.run.metrics import latest_rows
from efftrain_cli.run.stability import fluctuations
from efftrain_cli.trials.runner import TrialRunner
from efftrain_cli.trials.trial import Trial, parse_settings, run_name, setting_word
from efftrain_cli.tune_warmup.search import (
    BudgetError,
    Candidates,
    Probe,
    Receipt,
    Setting,
    Verdict,
    find_best,
    search,
)

MARK = "# Found by `efftrain tune-warmup`"
"""Beginning of a tuned recipe."""
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


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """What is searched, and how."""

    recipe: str
    """Name or path."""
    settings: Setting = ()
    start: str | None = None
    """`key=value,value`, the most wanted first; None: of a sequence length warmup."""
    duration: str | None = None
    """Likewise."""
    seeds: Sequence[int] = ()
    """Seeds of every setting; empty: three from the recipe's on."""
    steps: int | None = None
    """Steps that a duration is seen for; None: three learning-rate warmups."""
    threshold: float = 1.3
    """Perplexity over its best so far above which a probe is unstable."""
    budget: float = math.inf
    """Tokens that all probes together may train."""
    name: str | None = None
    """Of the search's folder; None: RECIPE-tune."""
    device: str = "auto"
    devices: int = 1


def tune(config: TuneConfig, plan_only: bool = False) -> Path:
    """Run the search, or what is left of it, and return its folder.

    Raises:
        UsageError: nothing to search for, a budget below the first probe, or the folder holds
            another search.
        DivergedError: no setting is recommended; the receipts are written.
    """
    recipe = load_recipe(config.recipe, config.settings)
    name = recipe_name(config.recipe)
    folder = run_path(config.name or f"{name}-tune")
    candidates = find_candidates(config, recipe)
    console = make_console()
    if plan_only:
        print_labelled(console, plan_lines(config, candidates, recipe), indent=9)
        return folder
    tuned = Path("recipes") / f"{name}-tuned.toml"
    check_free(tuned)
    _claim(folder, recipe)
    prober = Prober(folder=folder, config=config)
    verdicts: list[Verdict] = []
    try:
        with steady_output():
            for verdict in search(candidates, prober.see):
                verdicts.append(verdict)
                say(f"{shown(verdict.setting)}, {verdict.horizon:,} steps: {describe(verdict)}")
    except BudgetError as error:
        if not prober.receipts:
            raise UsageError(
                f"--budget {config.budget:,.0f} is below the first probe\n"
                f"  give at least {error.needed}"
            ) from None
        say(f"the budget ended\n  --budget {error.needed} continues from here")
    write_whole(folder / "receipts.csv", prober.table())
    best = find_best(candidates, verdicts)
    lines = list(result_lines(candidates, verdicts, best))
    lines.append(f"cost     {prober.cost(recipe)}")
    if best is None:
        print_labelled(console, lines, indent=9)
        receipts = folder / "receipts.csv"
        raise DivergedError(
            f"no warmup is recommended; {receipts} has the probes\n  {advice(verdicts)}"
        )
    tuned.parent.mkdir(exist_ok=True)
    write_whole(tuned, tuned_text(config, best))
    lines += [f"recipe   {tuned}", f"next     efftrain pretrain --recipe {tuned.stem}"]
    print_labelled(console, lines, indent=9)
    return folder


def check_free(path: Path) -> None:
    """Refuse a path with a recipe that no search has written.

    Raises:
        UsageError: there is one.
    """
    if path.exists() and not path.read_text("utf-8").startswith(MARK):
        raise UsageError(f"{path} exists and was not written by tune-warmup\n  rename it")


def shown(setting: Setting) -> str:
    """Write a setting without its section: "start=8 steps=60"."""
    return " ".join(text.rpartition(".")[2] for text in setting)


def describe(verdict: Verdict) -> str:
    """Describe what the seeds of a setting have shown, with the mean of their last losses."""
    loss = f"loss {verdict.loss:.2f}"
    last = verdict.words[-1]
    seeds = len(verdict.words)
    if verdict.is_stable:
        return f"stable on {counted(seeds, 'seed')} ({loss})"
    steps = [receipt.unstable_at for receipt in verdict.receipts if receipt.unstable_at is not None]
    if not steps:
        return f"{last} on seed {seeds} ({loss})"
    return f"unstable at step {min(steps):,} ({loss})"


def result_lines(
    candidates: Candidates, verdicts: Sequence[Verdict], best: Verdict | None
) -> Iterator[str]:
    """Describe the verdicts on one line, the control, and what was found."""
    if not verdicts:
        return
    control, *others = verdicts
    if others:
        tried = [f"{shown(verdict.setting)} {describe(verdict)}" for verdict in others]
        yield f"tried    {'; '.join(tried)}"
    yield f"control  {shown(control.setting)}: {describe(control)}"
    if best is not None:
        seeds = len(candidates.seeds)
        yield (
            f"found    {shown(best.setting)}: stable on {seeds} of {seeds} seeds"
            f" for {best.horizon:,} steps"
        )
    elif control.is_stable:
        yield f"found    nothing: {shown(control.setting)} is stable too"
    else:
        yield "found    nothing that is stable on all seeds and no worse than the control"


def advice(verdicts: Sequence[Verdict]) -> str:
    """Return what to do after a search that recommends nothing."""
    if verdicts and verdicts[0].is_stable:
        return f"train with {' '.join(verdicts[0].setting)}, or raise optim.lr"
    return "lower optim.lr, lengthen optim.warmup_steps, or give longer starts"


# What is searched.


def find_candidates(config: TuneConfig, recipe: Recipe) -> Candidates:
    """Return what the search chooses from.

    Raises:
        UsageError: a key without values, or a recipe without a learning-rate warmup.
    """
    climb = recipe.optim.warmup_steps
    if climb < 1:
        raise UsageError(
            "probes last as long as the learning-rate warmup, and optim.warmup_steps is 0\n"
            "  set it, for example --set optim.warmup_steps=100"
        )
    starts, durations = default_values(recipe)
    if config.duration is not None:
        starts = [()]
        durations = settings_of("--duration", config.duration)
    if config.start is not None:
        starts = settings_of("--start", config.start)
    section = durations[0][0].partition(".")[0]
    control: Setting = (f"{section}=false",)
    if section == "optim":
        control = starts[0] + durations[0]
    horizons = []
    is_own = []
    for duration in durations:
        varied = recipe_with(config, starts[0] + duration)
        wanted = config.steps or 3 * varied.optim.warmup_steps
        # The run may end before.
        horizons.append(summarize_plan(varied, until=wanted).steps)
        is_own.append(varied == recipe)
    return Candidates(
        starts=starts,
        durations=durations,
        first=is_own.index(True) if any(is_own) else len(durations) // 2,
        control=control,
        climb=climb,
        horizons=horizons,
        seeds=config.seeds or range(recipe.seed, recipe.seed + 3),
    )


def settings_of(option: str, text: str) -> list[Setting]:
    """Return a setting for each value of `key=value,value`.

    Raises:
        UsageError: there are fewer than two.
    """
    ((key, values),) = parse_settings([text])
    if len(values) < 2:
        raise UsageError(
            f"{option} {text!r} has one value, so nothing is searched\n"
            "  give several, the most wanted first"
        )
    return [(f"{key}={value}",) for value in values]


def default_values(recipe: Recipe) -> tuple[list[Setting], list[Setting]]:
    """Return starts and durations of a sequence length warmup around the recipe's own.

    Starts double from the recipe's on. Durations are factors of about 1.4 apart, from the
    learning-rate warmup to 0.66 of the run: the longest of the paper's authors took 63 %.
    """
    warmup = recipe.seq_len_warmup
    climb = recipe.optim.warmup_steps
    full_steps = recipe.train.tokens // (recipe.train.batch_size * recipe.model.seq_len)
    start = 8
    steps = max(climb, full_steps // 3)
    if warmup is not None and warmup.steps is not None:
        start = warmup.start
        steps = warmup.steps
    starts: list[Setting] = []
    while start < recipe.model.seq_len:
        starts.append((f"seq_len_warmup.start={start}",))
        start *= 2
    # The mean length of a warmup is about half the full one.
    longest = 2 * 0.66 * full_steps
    around = {steps}
    for power in range(-20, 21):
        duration = round(steps * 2 ** (power / 2))
        if climb <= duration <= longest:
            around.add(duration)
    return starts, [(f"seq_len_warmup.steps={n}",) for n in sorted(around, reverse=True)]


@cache
def recipe_with(config: TuneConfig, setting: Setting) -> Recipe:
    """Return the searched recipe with a setting."""
    return load_recipe(config.recipe, (*config.settings, *setting))


def tokens_of(config: TuneConfig, probe: Probe) -> int:
    """Return the tokens that a probe has trained at its horizon."""
    return summarize_plan(recipe_with(config, probe.setting), until=probe.horizon).tokens


def plan_lines(config: TuneConfig, candidates: Candidates, recipe: Recipe) -> Iterator[str]:
    """Describe the search before it begins, with the cost of its first verdicts."""
    first = candidates.durations[candidates.first]
    horizon = candidates.horizons[candidates.first]
    starts = ", ".join(map(shown, candidates.starts))
    if starts:
        yield f"starts   {starts}: {candidates.climb:,} steps each"
    durations = ", ".join(map(shown, candidates.durations))
    yield f"lengths  {durations}: {horizon:,} steps for the first, {shown(first)}"
    yield f"seeds    {', '.join(map(str, candidates.seeds))}: stable on all of them"
    control = Probe(candidates.control, 0, candidates.horizons[0])
    own = Probe(candidates.starts[0] + first, 0, horizon)
    for what, probe in (("control", control), ("cost", own)):
        tokens = len(candidates.seeds) * tokens_of(config, probe)
        share = tokens / recipe.train.tokens
        cost = f"{human(tokens)} tokens ({share:.1%} of a run)"
        yield f"{what:<8} {cost} for {shown(probe.setting)}, at most"


def _claim(folder: Path, recipe: Recipe) -> None:
    """Write the searched recipe, or check that the folder is of the same search.

    Raises:
        UsageError: it holds another recipe's, or no search.
    """
    path = folder / "search.toml"
    if path.exists():
        if load_recipe(str(path)) != recipe:
            raise UsageError(f"{path} is another recipe\n  give another --name, or remove {folder}")
    elif folder.exists():
        raise UsageError(f"{folder} exists but holds no search\n  give another --name")
    else:
        make_folder(folder)
        write_whole(path, dump_recipe(recipe))


def tuned_text(config: TuneConfig, best: Verdict) -> str:
    """Return the recipe that was found: a child of the one that was searched."""
    base = config.recipe
    if is_path(base):
        base = str(Path(base).absolute())
    draft = Draft(base, Path(base), values={"base": base})
    for text in (*config.settings, *best.setting):
        apply_override(draft, text)
    seeds = ", ".join(f"{receipt.loss:.2f}" for receipt in best.receipts)
    comment = f"{MARK}: stable for {best.horizon:,} steps on every seed, losses {seeds}.\n"
    return comment + "\n".join(toml_lines(draft.values)) + "\n"


# The probes.


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
            self.runner.train([trial])
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
