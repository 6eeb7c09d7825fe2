"""Our GPT as lm-evaluation-harness sees it: strings in, log-probabilities and text out.

Subclass of the harness's `TemplateLM`. Text is encoded in batches, context and continuation together and then split, as
the harness does; contexts that are empty, and documents in rolling likelihood, begin with end-of-text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text

from efftrain_cli.data.tokenizer import Tokenizer
from efftrain_cli.model.generate import GREEDY, generate
from efftrain_cli.zeroshot.meter import meter
from efftrain_cli.zeroshot.score import Evaluator, Request, Score, windows


class DoesNotFitError(Exception):
    """Continuations are longer than the context; nothing was scored. `items` are the doc_ids of their items."""

    def __init__(self, items: set[int]) -> None:
        super().__init__(f"{len(items)} items have a continuation longer than the context")
        self.items = items


class LanguageModel(TemplateLM):  # type: ignore[misc]  # the harness has no annotations
    """Counts, beside answering, what a reader of the scores must know; `begin` sets the counts to 0."""

    def __init__(self, evaluator: Evaluator, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.evaluator = evaluator
        self.text = tokenizer
        self.begin("")

    def begin(self, task: str) -> None:
        """Starts the counts of a task, which are `TaskScore`'s, anew; `task` names it on the progress line."""
        self.task = task
        self.requests = self.truncated = self.boundary_mismatches = 0

    @property
    def eot_token_id(self) -> int:
        return self.text.eot_id

    @property
    def max_length(self) -> int:
        return self.evaluator.context_length

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids; nothing is added, whatever is asked: it would break the split of context and continuation."""
        return self.text.encode([string])[0].tolist()

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """`TemplateLM.loglikelihood` with all texts encoded at once; a test holds the two together.

        Raises:
            DoesNotFitError: a continuation alone is longer than the context. Longer contexts are cut from the left.
        """
        pairs = []
        for request in requests:
            context, continuation = request.args
            # The harness's rule: a space between the two belongs to the continuation.
            stripped = context.rstrip()
            pairs.append(
                (stripped, context[len(stripped) :] + continuation)
                if stripped
                else (context, continuation)
            )
        contexts = list(dict.fromkeys(context for context, _ in pairs if context))
        encoded = dict(zip(contexts, self._encode(contexts), strict=True))
        wholes = self._encode([context + continuation for context, continuation in pairs])
        asked = []
        for (context, _), whole in zip(pairs, wholes, strict=True):
            if not context:
                # Conditioned on end-of-text, unless the text begins with it.
                whole = (
                    whole if whole[0] == self.prefix_token_id else (self.prefix_token_id, *whole)
                )
                asked.append(Request(whole[:1], whole[1:]))
                continue
            tokens = encoded[context]
            self.boundary_mismatches += whole[: len(tokens)] != tokens
            asked.append(Request(tokens, whole[len(tokens) :]))
        most = self.evaluator.context_length
        too_long = {
            int(r.doc_id)
            for r, one in zip(requests, asked, strict=True)
            if len(one.continuation) > most
        }
        if too_long:
            raise DoesNotFitError(too_long)
        return [(score.logprob, score.greedy) for score in self._score(asked)]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        asked = [
            Request(tuple(context), tuple(continuation)) for _, context, continuation in requests
        ]
        return [(score.logprob, score.greedy) for score in self._score(asked)]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-probability of whole texts: disjoint windows, only the last one sees more context than itself."""
        length = self.evaluator.context_length
        texts = self._encode([request.args[0] for request in requests])
        cut = [windows(text, length, stride=length, prefix=self.prefix_token_id) for text in texts]
        scores = iter(
            self._score([window for document in cut for window in document], may_overlap=True)
        )
        return [sum(score.logprob for score in islice(scores, len(document))) for document in cut]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy text up to a stop string, end-of-text or the token limit. Sampling is refused: no task here asks for
        it."""
        answers: list[tuple[int, str]] = []
        groups: dict[tuple[int, tuple[str, ...], int], list[tuple[int, tuple[int, ...]]]] = {}
        contexts = self._encode([request.args[0] for request in requests])
        for i, (request, context) in enumerate(zip(requests, contexts, strict=True)):
            asked = normalize_gen_kwargs(request.args[1])
            if asked["do_sample"]:
                raise ValueError(
                    f"{self.task} asks for sampled text; only greedy text can be repeated"
                )
            # The harness reserves the limit's whole length; a short model would have no room left for the question.
            limit = min(asked["max_gen_toks"], self.evaluator.context_length // 2)
            room = self.evaluator.context_length - limit
            self.truncated += len(context) > room
            kept = context[-room:] or (self.prefix_token_id,)
            groups.setdefault((len(kept), tuple(asked["until"]), limit), []).append((i, kept))
        self.requests += len(requests)
        # Contexts of one length go together, so that no padding has to be hidden from the attention.
        sharing = self.evaluator.sharing
        batches = []
        for (length, until, limit), members in groups.items():
            rows = max(1, self.evaluator.batch_tokens // (length + limit))
            batches += [
                (members[start : start + rows], until, limit)
                for start in range(0, len(members), rows)
            ]
        batches = sharing.deal(batches)
        with meter(self.task, "answers", sum(len(members) for members, _, _ in batches)) as advance:
            for members, until, limit in batches:
                texts = self._write([context for _, context in members], until, limit)
                answers += zip((i for i, _ in members), texts, strict=True)
                advance(len(members))
        asked = hashlib.sha256(repr(contexts).encode()).hexdigest()
        by_index = dict(sharing.gather(f"{self.task} {asked}", answers))
        return [by_index[i] for i in range(len(requests))]

    def _write(
        self, contexts: Sequence[tuple[int, ...]], until: tuple[str, ...], limit: int
    ) -> list[str]:
        """What follows each of some contexts of one length, up to the first stop string."""
        evaluator = self.evaluator
        prompt = torch.tensor(contexts, device=evaluator.device)
        with evaluator.autocast():
            columns = generate(evaluator.model, prompt, GREEDY, evaluator.context_length)
            written: list[list[int]] = [[] for _ in contexts]
            open_rows = set(range(len(contexts)))
            for column in islice(columns, limit):
                for row in list(open_rows):
                    token = int(column[row])
                    if token == self.eot_token_id:
                        open_rows.discard(row)
                        continue
                    written[row].append(token)
                    text = self.text.decode(written[row])
                    if any(stop in text for stop in until):
                        open_rows.discard(row)
                if not open_rows:
                    break
        return [
            postprocess_generated_text(
                self.text.decode(tokens), stop=list(until), think_end_token=None
            )
            for tokens in written
        ]

    def _encode(self, texts: list[str]) -> list[tuple[int, ...]]:
        return [tuple(ids.tolist()) for ids in self.text.encode(texts)]

    def _score(self, asked: list[Request], may_overlap: bool = False) -> list[Score]:
        self.requests += len(asked)
        if not may_overlap:
            self.truncated += sum(map(self.evaluator.is_truncated, asked))
        return self.evaluator.score(asked, self.task)
