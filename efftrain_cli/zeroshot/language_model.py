"""Present our GPT to lm-evaluation-harness: strings in, log-probabilities and text out.

The harness's `TemplateLM` encodes context and continuation together and then splits the tokens.
Empty contexts, and documents in rolling likelihood, begin with an end-of-text token.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text

from efftrain_cli.data.tokenizer import Tokenizer
from efftrain_cli.model.generate import GREEDY, generate
from efftrain_cli.zeroshot.score import Evaluator, Request, Score, TokenIds, windows


class DoesNotFitError(Exception):
    """Continuations are longer than the context length; nothing was scored.

    `items` are the doc_ids of their items, or the numbers of their requests.
    """

    def __init__(self, items: set[int]) -> None:
        super().__init__(f"{len(items)} items have a continuation longer than the context")
        self.items = items


class _AnswerBatch(NamedTuple):
    """Requests whose answers are written together."""

    members: list[tuple[int, TokenIds]]
    """Number and context of each request. All contexts have one length: no padding to mask."""
    until: tuple[str, ...]
    """Strings that end an answer."""
    limit: int
    """Most tokens of an answer."""


class LanguageModel(TemplateLM):  # type: ignore[misc]  # the harness has no annotations
    """Answer the harness's requests with a GPT; count requests and truncations."""

    def __init__(self, evaluator: Evaluator, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.evaluator = evaluator
        self.text = tokenizer
        # A context is encoded once for all its continuations, and a whole text once for both uses.
        self._encode_text = lru_cache(maxsize=1024)(lambda text: self._encode([text])[0])
        self.begin("")

    def begin(self, task: str) -> None:
        """Set the counts to 0; `TaskScore` explains them.

        Args:
            task: name under which progress is shown.
        """
        self.task = task
        self.requests = 0
        self.truncated = 0
        self.boundary_mismatches = 0

    @property
    def eot_token_id(self) -> int:
        return self.text.eot_id

    @property
    def max_length(self) -> int:
        return self.evaluator.context_length

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return ids without special tokens, which would move the border in `_encode_pair`."""
        return list(self._encode_text(string))

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        whole = self.tok_encode(context + continuation)
        if context.isspace():
            # The harness would move all of it to the continuation, and leave no context.
            border = len(self.tok_encode(context))
            return whole[:border], whole[border:]
        context_ids, continuation_ids = super()._encode_pair(context, continuation)
        if whole[: len(context_ids)] != context_ids:
            self.boundary_mismatches += 1
        return context_ids, continuation_ids

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Score continuations after contexts; a long context loses its beginning.

        Raises:
            DoesNotFitError: a continuation alone is longer than the context length.
        """
        try:
            return super().loglikelihood(requests, disable_tqdm=True)
        except DoesNotFitError as error:
            items = {int(requests[i].doc_id) for i in error.items}
            raise DoesNotFitError(items) from None
        finally:
            self._encode_text.cache_clear()

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        asked = []
        too_long = set()
        for i, (_, context, continuation) in enumerate(requests):
            asked.append(Request(tuple(context), tuple(continuation)))
            if len(continuation) > self.evaluator.context_length:
                too_long.add(i)
        if too_long:
            raise DoesNotFitError(too_long)
        return [(score.logprob, score.greedy) for score in self._score(asked)]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-probabilities of whole texts, in disjoint windows."""
        length = self.evaluator.context_length
        every_window = []
        counts = []
        for text in self._encode([request.args[0] for request in requests]):
            of_text = windows(text, length, stride=length, prefix=self.prefix_token_id)
            every_window += of_text
            counts.append(len(of_text))
        scores = iter(self._score(every_window, may_overlap=True))
        return [sum(score.logprob for score in islice(scores, count)) for count in counts]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Write greedy text up to a stop string, end-of-text or the token limit.

        Raises:
            ValueError: the task asks for sampled text.
        """
        contexts = self._encode([request.args[0] for request in requests])
        distributed = self.evaluator.distributed
        batches = distributed.deal(self._answer_batches(requests, contexts))
        self.requests += len(requests)
        total = sum(len(batch.members) for batch in batches)
        answers = []
        with self.evaluator.progress(f"{self.task} answers", total) as advance:
            for batch in batches:
                answers += self._write(batch)
                advance(len(batch.members))
        by_index = dict(distributed.gather(self.task, contexts, answers))
        return [by_index[i] for i in range(len(requests))]

    def _answer_batches(
        self, requests: list[Instance], contexts: list[TokenIds]
    ) -> list[_AnswerBatch]:
        """Divide requests into batches, and cut the beginning of contexts that are too long."""
        groups: dict[tuple[int, tuple[str, ...], int], list[tuple[int, TokenIds]]] = {}
        for i, (request, context) in enumerate(zip(requests, contexts, strict=True)):
            asked = normalize_gen_kwargs(request.args[1])
            if asked["do_sample"]:
                raise ValueError(
                    f"{self.task} asks for sampled text; only greedy text can be repeated"
                )
            # The harness reserves room for all tokens that the task allows: in a short context none
            # would be left for the question.
            limit = min(asked["max_gen_toks"], self.evaluator.context_length // 2)
            room = self.evaluator.context_length - limit
            if len(context) > room:
                self.truncated += 1
            context = context[-room:] or (self.prefix_token_id,)
            key = (len(context), tuple(asked["until"]), limit)
            groups.setdefault(key, []).append((i, context))

        batches = []
        for (length, until, limit), members in groups.items():
            rows = max(1, self.evaluator.batch_tokens // (length + limit))
            for start in range(0, len(members), rows):
                part = members[start : start + rows]
                batches.append(_AnswerBatch(part, until, limit))
        return batches

    def _write(self, batch: _AnswerBatch) -> list[tuple[int, str]]:
        """Continue each context up to the first stop string; return (request's number, text)."""
        evaluator = self.evaluator
        contexts = [context for _, context in batch.members]
        prompt = torch.tensor(contexts, device=evaluator.device)
        with evaluator.autocast():
            columns = generate(evaluator.model, prompt, GREEDY, evaluator.context_length)
            written: list[list[int]] = [[] for _ in contexts]
            open_rows = set(range(len(contexts)))
            for column in islice(columns, batch.limit):
                for row in list(open_rows):
                    token = int(column[row])
                    if token == self.eot_token_id:
                        open_rows.discard(row)
                        continue
                    written[row].append(token)
                    text = self.text.decode(written[row])
                    if any(stop in text for stop in batch.until):
                        open_rows.discard(row)
                if not open_rows:
                    break

        answers = []
        stop = list(batch.until)
        for (i, _), tokens in zip(batch.members, written, strict=True):
            text = self.text.decode(tokens)
            text = postprocess_generated_text(text, stop=stop, think_end_token=None)
            answers.append((i, text))
        return answers

    def _encode(self, texts: list[str]) -> list[TokenIds]:
        return [tuple(ids.tolist()) for ids in self.text.encode(texts)]

    def _score(self, asked: list[Request], may_overlap: bool = False) -> list[Score]:
        self.requests += len(asked)
        if not may_overlap:
            self.truncated += sum(map(self.evaluator.is_truncated, asked))
        return self.evaluator.score(asked, self.task)
