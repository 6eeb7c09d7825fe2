"""Published scores, each with the protocol it was measured by and where it stands. None of them was measured here.

A score compares with another only where the protocols are the same; labels say when they are not the harness's.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reference:
    """One published score; accuracies are fractions."""

    model: str
    task: str
    metric: str
    value: float
    protocol: str
    source: str


_GPT2_PAPER = ("GPT-2 paper's own, not the harness's", "Radford et al. 2019, Table 3")
_HARNESS_GPT2 = ("lm-eval", "lm-evaluation-harness, issue 2159")
_PYTHIA = ("lm-eval v0", "EleutherAI/pythia, evals/, commit a19eecb")
_GPT3 = (
    "GPT-3 paper's own, not the harness's",
    "GPT-3 paper as listed in Megatron-DeepSpeed, ds_evalharness_gather_result.py",
)

_GPT3_125M = {
    ("hellaswag", "acc_norm"): 0.337, ("lambada_openai", "acc"): 0.427, ("triviaqa", "exact_match"): 0.0415,
    ("webqs", "exact_match"): 0.0177, ("winogrande", "acc"): 0.520, ("piqa", "acc_norm"): 0.646,
    ("arc_challenge", "acc_norm"): 0.266, ("arc_easy", "acc_norm"): 0.436, ("anli_r1", "acc"): 0.334,
    ("anli_r2", "acc"): 0.332, ("anli_r3", "acc"): 0.336, ("openbookqa", "acc_norm"): 0.356, ("race", "acc"): 0.352,
    ("boolq", "acc"): 0.497, ("copa", "acc"): 0.66, ("rte", "acc"): 0.477, ("wsc", "acc"): 0.596,
    ("record", "f1"): 0.719,
}  # fmt: skip
"""MultiRC is left out: the paper's score counts whole questions, the harness's single answers."""

_PYTHIA_160M = {
    ("lambada_openai", "acc"): 0.3284, ("lambada_openai", "perplexity"): 38.06, ("piqa", "acc"): 0.6273,
    ("piqa", "acc_norm"): 0.6164, ("winogrande", "acc"): 0.5312, ("arc_easy", "acc"): 0.4352,
    ("arc_easy", "acc_norm"): 0.3965, ("arc_challenge", "acc"): 0.1877, ("arc_challenge", "acc_norm"): 0.2329,
}  # fmt: skip

_UNTRAINED = {
    ("lambada_openai", "acc"): 0.0, ("lambada_openai", "perplexity"): 3.56e6, ("piqa", "acc"): 0.5245,
    ("piqa", "acc_norm"): 0.5131, ("winogrande", "acc"): 0.4736, ("arc_easy", "acc"): 0.2580,
    ("arc_easy", "acc_norm"): 0.2601, ("arc_challenge", "acc"): 0.2329, ("arc_challenge", "acc_norm"): 0.2619,
}  # fmt: skip

REFERENCES: tuple[Reference, ...] = (
    Reference("GPT-2 117M", "lambada_openai", "acc", 0.4599, *_GPT2_PAPER),
    Reference("GPT-2 117M", "lambada_openai", "perplexity", 35.13, *_GPT2_PAPER),
    Reference("GPT-2 117M", "lambada_openai", "acc", 0.3256, *_HARNESS_GPT2),
    Reference("GPT-2 117M", "lambada_openai", "perplexity", 40.055, *_HARNESS_GPT2),
    Reference(
        "GPT-2 117M", "lambada_last_token", "acc", 0.4667, "last token", "transformers, issue 13761"
    ),
    Reference(
        "GPT-2 117M", "wikitext", "word_perplexity", 37.37, "lm-eval", "transformers, issue 13761"
    ),
    Reference("GPT-2 117M", "wikitext_strided", "token_perplexity", 29.41, *_GPT2_PAPER),
    Reference(
        "GPT-2 117M", "hellaswag", "acc", 0.2892, "lm-eval", "karpathy/llm.c, dev/data/hellaswag.py"
    ),
    Reference(
        "GPT-2 117M",
        "hellaswag",
        "acc_norm",
        0.3114,
        "lm-eval",
        "karpathy/llm.c, dev/data/hellaswag.py",
    ),
    *(
        Reference("GPT-3 125M", task, metric, value, *_GPT3)
        for (task, metric), value in _GPT3_125M.items()
    ),
    *(
        Reference("Pythia-160M", task, metric, value, *_PYTHIA)
        for (task, metric), value in _PYTHIA_160M.items()
    ),
    *(
        Reference("untrained 160M", task, metric, value, *_PYTHIA)
        for (task, metric), value in _UNTRAINED.items()
    ),
)


def references_for(task: str) -> list[Reference]:
    """What has been published for a task."""
    return [reference for reference in REFERENCES if reference.task == task]
