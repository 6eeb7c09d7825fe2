"""Score by protocols that lm-evaluation-harness lacks: LAMBADA's last token, strided WikiText, the
offline suite.

The offline suite is made from the run's own validation documents and needs neither network nor the
harness. Its scores compare checkpoints that share these documents, and nothing else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from efftrain_cli.data.tokenizer import Tokenizer
from efftrain_cli.foundation.console import perplexity
from efftrain_cli.foundation.errors import DataError
from efftrain_cli.foundation.records import text_digest
from efftrain_cli.zeroshot.score import Evaluator, Request, windows
from efftrain_cli.zeroshot.task_score import (
    TaskScore,
    mean_and_error,
    perplexity_and_error,
    without,
)

CLOZE_WORDS = 50
"""Words of context before the word to predict."""
CLOZE_ITEMS = 1000
"""Most passages of the offline cloze."""
_WORD = re.compile(r"(?<=\S)( [A-Za-z]{3,})(?![A-Za-z0-9_])")
"""The word to predict: three letters or more after a space that follows something visible."""


def lambada_last_token(
    evaluator: Evaluator, tokenizer: Tokenizer, texts: Sequence[str], limit: int | None
) -> TaskScore:
    """Predict the last token of each passage from all before it: Megatron-LM's LAMBADA without
    --strict-lambada.

    If the last word has several tokens, this is easier than to predict the word: scores depend on
    the tokenizer.
    """
    kept = texts[:limit]
    requests = []
    for ids in tokenizer.encode(list(kept)):
        tokens = tuple(ids.tolist())
        # A passage of one token is predicted after end-of-text.
        context = tokens[:-1] or (tokenizer.eot_id,)
        requests.append(Request(context, tokens[-1:]))
    return _cloze_score(
        evaluator,
        "lambada_last_token",
        requests,
        kept,
        total=len(texts),
        protocol="last token of LAMBADA",
    )


def wikitext_strided(
    evaluator: Evaluator,
    tokenizer: Tokenizer,
    pages: Sequence[tuple[str, str]],
    limit: int | None,
    stride: int,
) -> TaskScore:
    """Compute the perplexity of all pages as one stream of tokens, in overlapping windows, as
    Megatron-LM does.

    No end-of-text token is added, and the first token is not predicted. The perplexity per word is
    exp(nll / (words - 1)), with the original text split at single spaces. Bits per byte count bytes
    of the original text.

    Args:
        pages: (original text, detokenized text) of each page.
        stride: tokens predicted per window; the rest of the window is context.
    """
    kept = pages[:limit]
    original = "".join(page for page, _ in kept)
    detokenized = "".join(text for _, text in kept)
    tokens = tokenizer.encode([detokenized])[0].tolist()
    requests = windows(tokens, evaluator.context_length, stride, prefix=None)
    scores = evaluator.score(requests, "wikitext_strided")
    nll = -math.fsum(score.logprob for score in scores)
    words = original.split(" ")
    metrics = {
        "token_perplexity": perplexity(nll / (len(tokens) - 1)),
        "word_perplexity": perplexity(nll / (len(words) - 1)),
        "bits_per_byte": nll / math.log(2) / len(original.encode()),
    }
    return TaskScore(
        values=metrics,
        items=[
            {
                "doc_id": i,
                "doc_hash": text_digest(str(request.continuation)),
                "logprob": score.logprob,
                "tokens": len(request.continuation),
            }
            for i, (request, score) in enumerate(zip(requests, scores, strict=True))
        ],
        scored=len(kept),
        total=len(pages),
        protocol=f"strided WikiText-2 window {evaluator.context_length} stride {stride}",
        requests=len(requests),
    )


def offline_cloze(
    evaluator: Evaluator, tokenizer: Tokenizer, documents: Sequence[str], limit: int | None
) -> TaskScore:
    """Predict the last word of passages of the run's validation documents.

    A word counts for accuracy if greedy decoding gives all of its tokens; perplexity is per word.
    """
    passages = cloze_passages(documents)
    kept = passages[:limit]
    contexts = tokenizer.encode([context for context, _ in kept])
    wholes = tokenizer.encode([context + word for context, word in kept])
    requests = []
    texts = []
    left_out = []
    mismatches = 0
    for number, (context, whole) in enumerate(zip(contexts, wholes, strict=True)):
        tokens = tuple(whole.tolist())
        start = tokens[: len(context)]
        word = tokens[len(context) :]
        if len(word) > evaluator.context_length:
            left_out.append(f"passage {number}")
            continue
        # A tokenizer may merge the end of the context with the word.
        if start != tuple(context.tolist()):
            mismatches += 1
        requests.append(Request(start, word))
        texts.append("".join(kept[number]))
    if not requests:
        raise DataError(
            f"offline_cloze: none of {len(kept)} words"
            f" fits a context of {evaluator.context_length} tokens"
        )
    protocol = f"offline cloze, {CLOZE_WORDS} words, documents {fingerprint(documents)}"
    protocol += without(len(left_out), evaluator.context_length)
    score = _cloze_score(
        evaluator,
        "offline_cloze",
        requests,
        texts,
        total=len(passages),
        protocol=protocol,
    )
    return replace(score, boundary_mismatches=mismatches, left_out=tuple(left_out))


def cloze_passages(documents: Sequence[str]) -> list[tuple[str, str]]:
    """Return (context, " word") pairs, at most `CLOZE_ITEMS`, spread evenly over the documents,
    without overlap.

    A passage is `CLOZE_WORDS` words (split at white space, kept as they stand) and ends before the
    first word of three letters or more that follows. Contexts end without a space.
    """
    passages = []
    for document in documents:
        words = list(re.finditer(r"\S+", document))
        first = 0
        while first + CLOZE_WORDS < len(words):
            last = words[first + CLOZE_WORDS - 1]
            # The pattern looks back at a visible character: the last one of the context's words.
            word = _WORD.search(document, last.end() - 1)
            if word is None:
                break
            context = document[words[first].start() : word.start()]
            passages.append((context, word.group(1)))
            while first < len(words) and words[first].start() < word.end():
                first += 1

    if len(passages) <= CLOZE_ITEMS:
        return passages
    return [passages[i * len(passages) // CLOZE_ITEMS] for i in range(CLOZE_ITEMS)]


def offline_bytes(
    evaluator: Evaluator, tokenizer: Tokenizer, documents: Sequence[str], limit: int | None
) -> TaskScore:
    """Compute the perplexity of the run's validation documents, each after an end-of-text token.

    Windows are disjoint, as in the rolling log-likelihood of lm-evaluation-harness. Bits per byte
    can be compared between tokenizers.
    """
    kept = list(documents[:limit])
    length = evaluator.context_length
    requests: list[Request] = []
    items: list[dict[str, Any]] = []
    windows_of = []
    for i, (document, ids) in enumerate(zip(kept, tokenizer.encode(kept), strict=True)):
        own = windows(ids.tolist(), length, stride=length, prefix=tokenizer.eot_id)
        requests += own
        windows_of.append(len(own))
        items.append(
            {
                "doc_id": i,
                "doc_hash": text_digest(document),
                "logprob": 0.0,
                "bytes": len(document.encode()),
                "tokens": len(ids),
            }
        )

    # Scores come in the order of the requests: each document takes as many as it has windows.
    scores = iter(evaluator.score(requests, "offline_bytes"))
    for item, count in zip(items, windows_of, strict=True):
        item["logprob"] = math.fsum(score.logprob for score in islice(scores, count))

    nll = -math.fsum(item["logprob"] for item in items)
    n_bytes = sum(item["bytes"] for item in items)
    n_tokens = sum(item["tokens"] for item in items)
    metrics = {
        "bits_per_byte": nll / math.log(2) / n_bytes,
        "byte_perplexity": perplexity(nll / n_bytes),
        "token_perplexity": perplexity(nll / n_tokens),
    }
    return TaskScore(
        values=metrics,
        items=items,
        scored=len(kept),
        total=len(documents),
        protocol=f"offline bytes, documents {fingerprint(documents)} window {length}",
        requests=len(requests),
    )


def fingerprint(documents: Sequence[str]) -> str:
    """Return eight hex digits of the documents' hash: a protocol names the documents by them."""
    return text_digest("\0".join(documents))[:8]


def _cloze_score(
    evaluator: Evaluator,
    task: str,
    requests: Sequence[Request],
    texts: Sequence[str],
    total: int,
    protocol: str,
) -> TaskScore:
    """Return accuracy of greedy decoding and perplexity over requests, one per text."""
    scores = evaluator.score(requests, task)
    accuracy, accuracy_error = mean_and_error([float(score.greedy) for score in scores])
    per_word, per_word_error = perplexity_and_error([score.logprob for score in scores])
    return TaskScore(
        values={"acc": accuracy, "perplexity": per_word},
        stderr={"acc": accuracy_error, "perplexity": per_word_error},
        items=[
            {
                "doc_id": i,
                "doc_hash": text_digest(text),
                "acc": float(score.greedy),
                "perplexity": score.logprob,
            }
            for i, (text, score) in enumerate(zip(texts, scores, strict=True))
        ],
        scored=len(scores),
        total=total,
        protocol=protocol,
        requests=len(scores),
        truncated=sum(map(evaluator.is_truncated, requests)),
    )


OFFLINE = {"offline_cloze": offline_cloze, "offline_bytes": offline_bytes}
"""Tasks made from the run's own validation documents."""
