"""Name the tasks, the one metric that counts for each, and the suites that are averaged.

Metrics are fixed here, before any score is seen. Names and definitions are lm-evaluation-harness's unless a task is
marked as our own. Nothing here imports torch or lm_eval.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from efftrain_cli.foundation.errors import UsageError, nearest


@dataclass(frozen=True)
class Task:
    """A task and the meaning of its score."""

    name: str
    metric: str
    """The metric that is reported first and enters means."""
    metrics: tuple[str, ...]
    """All metrics that are kept."""
    about: str
    chance: float | None = None
    """Score of guessing, as a fraction; None if guessing scores nothing or the metric is a perplexity."""
    definition: str | None = None
    """File of the definition inside lm_eval/tasks; None for our own tasks."""
    hub: str | None = None
    """Dataset on the Hugging Face Hub, "owner/name"."""
    file: str | None = None
    """Name of its file in a --data-dir."""


_LENGTH_NORMED = frozenset({"hellaswag", "piqa", "arc_easy", "arc_challenge", "openbookqa"})
_PASSAGES = {"hub": "EleutherAI/lambada_openai", "file": "lambada_openai.jsonl"}
_PAGES = {"hub": "EleutherAI/wikitext_document_level", "file": "wikitext2_test_pages.jsonl"}


def _task(
    name: str,
    metrics: str,
    about: str,
    definition: str | None = None,
    hub: str | None = None,
    file: str | None = None,
) -> Task:
    """Make a task whose first metric counts."""
    names = tuple(metrics.split())
    return Task(name, names[0], names, about, definition=definition, hub=hub, file=file)


def _choice(name: str, chance: float, definition: str, hub: str, about: str) -> Task:
    """Make a task of answers to choose from, counted as acc_norm if their lengths differ."""
    metrics = ("acc", "acc_norm") if name in _LENGTH_NORMED else ("acc",)
    file = f"{name}.jsonl"
    return Task(
        name, metrics[-1], metrics, about, chance=chance, definition=definition, hub=hub, file=file
    )


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _task(
            "lambada_openai",
            "acc perplexity",
            "last word of a passage: all its tokens by greedy decoding; perplexity per word",
            "lambada/lambada_openai.yaml",
            **_PASSAGES,
        ),
        _task(
            "lambada_last_token",
            "acc perplexity",
            "last token of the same passages, as Megatron-LM scores by default; easier than the last word",
            **_PASSAGES,
        ),
        _task(
            "wikitext",
            "word_perplexity byte_perplexity bits_per_byte",
            "WikiText-2 test by page, disjoint windows, per word and byte of the original page",
            "wikitext/wikitext.yaml",
            **_PAGES,
        ),
        _task(
            "wikitext_strided",
            "token_perplexity word_perplexity bits_per_byte",
            "WikiText-2 test as one stream of tokens, overlapping windows, as Megatron-LM's --overlapping-eval",
            **_PAGES,
        ),
        _choice(
            "hellaswag", 0.25, "hellaswag/hellaswag.yaml", "Rowan/hellaswag", "which ending follows"
        ),
        _task(
            "triviaqa",
            "exact_match",
            "answer to a question, written greedily",
            "triviaqa/default.yaml",
            hub="mandarjoshi/trivia_qa",
            file="triviaqa_3000.jsonl",
        ),
        _task(
            "webqs",
            "exact_match",
            "any accepted answer is what greedy decoding writes",
            "webqs/webqs.yaml",
            hub="stanfordnlp/web_questions",
            file="webqs.jsonl",
        ),
        _choice(
            "winogrande",
            0.5,
            "winogrande/default.yaml",
            "allenai/winogrande",
            "whom a pronoun means",
        ),
        _choice(
            "piqa", 0.5, "piqa/piqa.yaml", "baber/piqa", "which way to do an everyday thing works"
        ),
        _choice(
            "arc_challenge",
            0.25,
            "arc/arc_challenge.yaml",
            "allenai/ai2_arc",
            "school science, hard",
        ),
        _choice("arc_easy", 0.25, "arc/arc_easy.yaml", "allenai/ai2_arc", "school science, easy"),
        *(
            _choice(
                f"anli_r{n}",
                1 / 3,
                f"anli/anli_r{n}.yaml",
                "facebook/anli",
                f"does the premise say so, round {n}",
            )
            for n in (1, 2, 3)
        ),
        _choice(
            "openbookqa",
            0.25,
            "openbookqa/openbookqa.yaml",
            "allenai/openbookqa",
            "elementary science",
        ),
        _choice(
            "race", 0.25, "race/race.yaml", "EleutherAI/race", "questions about a text, high school"
        ),
        _choice(
            "boolq",
            0.5,
            "super_glue/boolq/default.yaml",
            "aps/super_glue",
            "yes or no about a passage",
        ),
        _choice(
            "copa",
            0.5,
            "super_glue/copa/default.yaml",
            "aps/super_glue",
            "cause or effect of an event",
        ),
        _choice(
            "rte",
            0.5,
            "glue/rte/default.yaml",
            "nyu-mll/glue",
            "does one sentence follow from another",
        ),
        _choice(
            "wsc",
            0.5,
            "super_glue/wsc/default.yaml",
            "aps/super_glue",
            "SuperGLUE's Winograd schemas, yes or no",
        ),
        _choice(
            "wsc273",
            0.5,
            "wsc273/default.yaml",
            "lighteval/winograd_wsc",
            "Winograd schemas, by continuation",
        ),
        _choice(
            "multirc",
            0.5,
            "super_glue/multirc/default.yaml",
            "aps/super_glue",
            "is this answer correct",
        ),
        _task(
            "record",
            "f1 em",
            "which entity fills the gap in a news text",
            "super_glue/record/default.yaml",
            hub="aps/super_glue",
            file="record.jsonl",
        ),
        _task(
            "offline_cloze",
            "acc perplexity",
            "last word of passages of the run's own validation documents; perplexity per word",
        ),
        _task(
            "offline_bytes",
            "bits_per_byte byte_perplexity token_perplexity",
            "the run's own validation documents, one by one, disjoint windows",
        ),
    )
}

SLW_11 = (
    "hellaswag",
    "lambada_openai",
    "triviaqa",
    "webqs",
    "winogrande",
    "piqa",
    "arc_challenge",
    "arc_easy",
    "anli_r1",
    "anli_r2",
    "anli_r3",
)
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
    """Return the tasks that names of tasks and suites stand for, each once, in the order given.

    Raises:
        UsageError: names that are neither, each with the nearest ones.
    """
    found: dict[str, None] = {}
    unknown = []
    for name in wanted:
        if name in SUITES or name in TASKS:
            found |= dict.fromkeys(SUITES.get(name, (name,)))
        else:
            hint = nearest(name, [*SUITES, *TASKS], cutoff=0.4)
            unknown.append(f"{name!r} ({hint})" if hint else repr(name))
    if unknown:
        raise UsageError(
            f"unknown task {', '.join(unknown)}. Suites: {', '.join(SUITES)}. Tasks: {', '.join(TASKS)}"
        )
    return list(found)


def suite_mean(suite: str, scores: dict[str, float]) -> float:
    """Return the unweighted mean of the suite's tasks.

    Args:
        scores: the value of each task's own metric.

    Raises:
        ValueError: the suite is not averaged, or a task is missing: a mean over fewer tasks is another number.
    """
    if suite not in AVERAGED:
        raise ValueError(f"{suite} mixes accuracies and perplexities and has no mean")
    missing = [name for name in SUITES[suite] if name not in scores]
    if missing:
        raise ValueError(f"no mean of {suite}: {', '.join(missing)} missing")
    return sum(scores[name] for name in SUITES[suite]) / len(SUITES[suite])
