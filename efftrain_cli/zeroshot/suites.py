"""The tasks by name, the one metric that counts for each, and the suites that are averaged.

Metrics are fixed here, before any score is seen. Names and definitions are lm-evaluation-harness's unless a task is marked
as our own. Nothing here imports torch or lm_eval.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

from efftrain_cli.foundation.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task and what its score means."""

    name: str
    metric: str
    """The metric that is reported first and enters means."""
    metrics: tuple[str, ...]
    """All metrics that are kept."""
    about: str
    chance: float | None = None
    """Score of guessing, as a fraction; None where guessing scores nothing or the metric is a perplexity."""
    definition: str | None = None
    """File of the definition inside lm_eval/tasks; None for our own tasks."""
    hub: str | None = None
    """Dataset on the Hugging Face Hub, "owner/name"."""
    file: str | None = None
    """Name of its file in a --data-dir."""

    @property
    def own(self) -> bool:
        """Not lm-evaluation-harness's: scored by our own protocol."""
        return self.definition is None


def _choice(name: str, metric: str, chance: float, definition: str, hub: str, about: str, file: str = "") -> Task:
    metrics = ("acc", "acc_norm") if name in {"hellaswag", "piqa", "arc_easy", "arc_challenge", "openbookqa"} else ("acc",)
    return Task(
        name=name,
        metric=metric,
        metrics=metrics,
        about=about,
        chance=chance,
        definition=definition,
        hub=hub,
        file=file or f"{name}.jsonl",
    )


ALL_TASKS: tuple[Task, ...] = (
    Task(
        name="lambada_openai",
        metric="acc",
        metrics=("acc", "perplexity"),
        about="last word of a passage: all its tokens by greedy decoding; perplexity per word",
        definition="lambada/lambada_openai.yaml",
        hub="EleutherAI/lambada_openai",
        file="lambada_openai.jsonl",
    ),
    Task(
        name="lambada_last_token",
        metric="acc",
        metrics=("acc", "perplexity"),
        about="last token of the same passages, as Megatron-LM scores by default; easier than the last word",
        hub="EleutherAI/lambada_openai",
        file="lambada_openai.jsonl",
    ),
    Task(
        name="wikitext",
        metric="word_perplexity",
        metrics=("word_perplexity", "byte_perplexity", "bits_per_byte"),
        about="WikiText-2 test by page, disjoint windows, per word and byte of the original page",
        definition="wikitext/wikitext.yaml",
        hub="EleutherAI/wikitext_document_level",
        file="wikitext2_test_pages.jsonl",
    ),
    Task(
        name="wikitext_strided",
        metric="token_perplexity",
        metrics=("token_perplexity", "word_perplexity", "bits_per_byte"),
        about="WikiText-2 test as one stream of tokens, overlapping windows, as Megatron-LM's --overlapping-eval",
        hub="EleutherAI/wikitext_document_level",
        file="wikitext2_test_pages.jsonl",
    ),
    _choice("hellaswag", "acc_norm", 0.25, "hellaswag/hellaswag.yaml", "Rowan/hellaswag", "which ending follows"),
    Task(
        name="triviaqa",
        metric="exact_match",
        metrics=("exact_match",),
        about="answer to a question, written greedily",
        definition="triviaqa/default.yaml",
        hub="mandarjoshi/trivia_qa",
        file="triviaqa_3000.jsonl",
    ),
    Task(
        name="webqs",
        metric="exact_match",
        metrics=("exact_match",),
        about="any accepted answer is what greedy decoding writes",
        definition="webqs/webqs.yaml",
        hub="stanfordnlp/web_questions",
        file="webqs.jsonl",
    ),
    _choice("winogrande", "acc", 0.5, "winogrande/default.yaml", "allenai/winogrande", "whom a pronoun means"),
    _choice("piqa", "acc_norm", 0.5, "piqa/piqa.yaml", "baber/piqa", "which way to do an everyday thing works"),
    _choice("arc_challenge", "acc_norm", 0.25, "arc/arc_challenge.yaml", "allenai/ai2_arc", "school science, hard"),
    _choice("arc_easy", "acc_norm", 0.25, "arc/arc_easy.yaml", "allenai/ai2_arc", "school science, easy"),
    _choice("anli_r1", "acc", 1 / 3, "anli/anli_r1.yaml", "facebook/anli", "does the premise say so, round 1"),
    _choice("anli_r2", "acc", 1 / 3, "anli/anli_r2.yaml", "facebook/anli", "does the premise say so, round 2"),
    _choice("anli_r3", "acc", 1 / 3, "anli/anli_r3.yaml", "facebook/anli", "does the premise say so, round 3"),
    _choice("openbookqa", "acc_norm", 0.25, "openbookqa/openbookqa.yaml", "allenai/openbookqa", "elementary science"),
    _choice("race", "acc", 0.25, "race/race.yaml", "EleutherAI/race", "questions about a text, high school"),
    _choice("boolq", "acc", 0.5, "super_glue/boolq/default.yaml", "aps/super_glue", "yes or no about a passage"),
    _choice("copa", "acc", 0.5, "super_glue/copa/default.yaml", "aps/super_glue", "cause or effect of an event"),
    _choice("rte", "acc", 0.5, "glue/rte/default.yaml", "nyu-mll/glue", "does one sentence follow from another"),
    _choice("wsc", "acc", 0.5, "super_glue/wsc/default.yaml", "aps/super_glue", "SuperGLUE's Winograd schemas, yes or no"),
    _choice("wsc273", "acc", 0.5, "wsc273/default.yaml", "lighteval/winograd_wsc", "Winograd schemas, by continuation"),
    _choice("multirc", "acc", 0.5, "super_glue/multirc/default.yaml", "aps/super_glue", "is this answer correct"),
    Task(
        name="record",
        metric="f1",
        metrics=("f1", "em"),
        about="which entity fills the gap in a news text",
        definition="super_glue/record/default.yaml",
        hub="aps/super_glue",
        file="record.jsonl",
    ),
    Task(
        name="offline_cloze",
        metric="acc",
        metrics=("acc", "perplexity"),
        about="last word of passages of the run's own validation documents; perplexity per word",
    ),
    Task(
        name="offline_bytes",
        metric="bits_per_byte",
        metrics=("bits_per_byte", "byte_perplexity", "token_perplexity"),
        about="the run's own validation documents, one by one, disjoint windows",
    ),
)

TASKS: dict[str, Task] = {task.name: task for task in ALL_TASKS}

SLW_11 = (
    "hellaswag", "lambada_openai", "triviaqa", "webqs", "winogrande", "piqa", "arc_challenge", "arc_easy",
    "anli_r1", "anli_r2", "anli_r3",
)  # fmt: skip
"""The eleven tasks that the sequence length warmup paper most likely averages (docs/zeroshot.md says why)."""

SUITES: dict[str, tuple[str, ...]] = {
    "offline": ("offline_cloze", "offline_bytes"),
    "gpt2": ("lambada_openai", "lambada_last_token", "wikitext", "wikitext_strided"),
    "slw-11": SLW_11,
    "gpt3": (*SLW_11, "openbookqa", "race", "boolq", "copa", "rte", "wsc", "multirc", "record"),
}

AVERAGED = ("slw-11", "gpt3")
"""Suites with an unweighted mean over their tasks' own metrics; the others mix accuracies and perplexities."""


def task_names(wanted: Iterable[str]) -> list[str]:
    """The task names that names of tasks and suites stand for, each once, in the order given.

    Raises:
        UsageError: a name is neither; every one is listed with the nearest names.
    """
    found: dict[str, None] = {}
    unknown = []
    for name in wanted:
        if name in SUITES:
            found.update(dict.fromkeys(SUITES[name]))
        elif name in TASKS:
            found[name] = None
        else:
            near = get_close_matches(name, [*SUITES, *TASKS], n=3, cutoff=0.4)
            unknown.append(f"{name!r}" + (f" (did you mean {' or '.join(near)}?)" if near else ""))
    if unknown:
        raise UsageError(
            f"unknown task {', '.join(unknown)}. Suites: {', '.join(SUITES)}. Tasks: {', '.join(TASKS)}"
        )
    return list(found)


def suite_mean(suite: str, scores: dict[str, float]) -> float:
    """Unweighted mean of the suite's tasks, `scores` being each task's own metric.

    Raises:
        ValueError: the suite is not averaged, or a task is missing: a mean over fewer tasks is another number.
    """
    if suite not in AVERAGED:
        raise ValueError(f"{suite} mixes accuracies and perplexities and has no mean")
    missing = [name for name in SUITES[suite] if name not in scores]
    if missing:
        raise ValueError(f"no mean of {suite}: {', '.join(missing)} missing")
    return sum(scores[name] for name in SUITES[suite]) / len(SUITES[suite])
