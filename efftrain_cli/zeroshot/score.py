"""Compute log-probabilities of continuations, in batches of similar length.

Contexts that several requests share are computed once, and only positions whose logits are read go
through the head. Padding on the right is safe: no position of a causal model depends on later ones.
Logits are computed in fp32 over the vocabulary without its padding, whatever type the blocks
compute in: rounding there changes the most likely token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from efftrain_cli.foundation.console import silent
from efftrain_cli.foundation.progress import show_progress
from efftrain_cli.model.gpt import GPT, KeyValueCache
from efftrain_cli.model.kernels import attention_kernels
from efftrain_cli.zeroshot.distributed import DistributedEval

TokenIds = tuple[int, ...]
HEAD_POSITIONS = 1024
"""Positions that go through the head at once: fp32 logits of 1024 x 50257 are 206 MB."""
SECONDS_BETWEEN_LINES = 30.0
"""Seconds between two lines of progress where there is no terminal."""


class Request(NamedTuple):
    """A continuation to score after a context; neither is empty."""

    context: TokenIds
    continuation: TokenIds


class Score(NamedTuple):
    """Natural log of p(continuation | context), and whether greedy decoding gives the
    continuation."""

    logprob: float
    greedy: bool


class _Batch(NamedTuple):
    """Requests that go through the model together."""

    indices: list[int]
    shares_contexts: bool
    """Several requests continue one context; equal contexts stand together, and all have one
    length."""


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """A GPT with the settings of its evaluation."""

    model: GPT
    context_length: int
    """Most input tokens; longer inputs lose their beginning."""
    batch_tokens: int = 4096
    """Tokens, padding included, in one forward pass."""
    bf16: bool = False
    """Whether the blocks compute in bf16; the head computes in fp32."""
    compiled_hidden: Callable[[Tensor], Tensor] | None = None
    """`model.hidden` compiled for changing shapes, for passes without a cache."""
    distributed: DistributedEval = field(default_factory=DistributedEval)
    """The other processes, each of which has the model."""

    @property
    def device(self) -> torch.device:
        return self.model.device

    def autocast(self) -> AbstractContextManager[object]:
        if self.bf16:
            return torch.autocast(self.device.type, torch.bfloat16)
        return nullcontext()

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show progress on standard error; yield a function to call with what a batch added."""
        from rich.console import Console

        console = Console(stderr=True, soft_wrap=True, highlight=False, quiet=silent())
        done = 0
        with show_progress(console, "evaluating", SECONDS_BETWEEN_LINES) as report:

            def advance(count: int) -> None:
                nonlocal done
                done += count
                report(what, done, total)

            yield advance

    def is_truncated(self, request: Request) -> bool:
        """Return whether the request's context loses its beginning. The last token is no input."""
        return len(request.context) + len(request.continuation) - 1 > self.context_length

    def score(self, requests: Sequence[Request], task: str = "scoring") -> list[Score]:
        """Return scores in the order of `requests`, with progress on stderr under the name `task`.

        Raises:
            ValueError: a context or continuation is empty, or a continuation is longer than the
                context length.
        """
        batches = self.distributed.deal(self._batches(requests))
        scores: list[tuple[int, Score]] = []
        total = sum(len(batch.indices) for batch in batches)
        with self.progress(f"{task} requests", total) as advance, torch.inference_mode():
            for batch in batches:
                asked = [requests[i] for i in batch.indices]
                if batch.shares_contexts:
                    answers = self._score_shared(asked)
                else:
                    answers = self._score_alone(asked)
                scores += zip(batch.indices, answers, strict=True)
                advance(len(asked))
        gathered = self.distributed.gather(task, requests, scores)
        by_index = {i: Score(*score) for i, score in gathered}
        return [by_index[i] for i in range(len(requests))]

    def _batches(self, requests: Sequence[Request]) -> list[_Batch]:
        """Divide all requests into batches, the longest first in each of the two kinds."""
        by_context: dict[TokenIds, list[int]] = {}
        alone = []
        for i, (context, continuation) in enumerate(requests):
            if not context or not continuation:
                raise ValueError(f"request {i} has an empty context or continuation")
            if len(continuation) > self.context_length:
                raise ValueError(
                    f"a continuation of {len(continuation)} tokens"
                    f" does not fit {self.context_length} positions"
                )
            if self.is_truncated(requests[i]):
                alone.append(i)
            else:
                by_context.setdefault(context, []).append(i)

        # The cache of a context with one continuation would be read once: that is one plain
        # sequence.
        shared = []
        for indices in by_context.values():
            if len(indices) > 1:
                shared.append(indices)
            else:
                alone += indices
        return [
            *(_Batch(indices, True) for indices in self._batches_of_shared(requests, shared)),
            *(_Batch(indices, False) for indices in self._batches_of_alone(requests, alone)),
        ]

    # Requests one by one: (context + continuation) as one sequence.

    def _batches_of_alone(
        self, requests: Sequence[Request], indices: list[int]
    ) -> Iterator[list[int]]:
        def input_length(i: int) -> int:
            context, continuation = requests[i]
            return min(len(context) + len(continuation) - 1, self.context_length)

        batch: list[int] = []
        for i in sorted(indices, key=input_length, reverse=True):
            if batch and (len(batch) + 1) * input_length(batch[0]) > self.batch_tokens:
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    def _score_alone(self, requests: Sequence[Request]) -> list[Score]:
        inputs = []
        first_columns = []
        continuations = []
        for context, continuation in requests:
            tokens = (context + continuation)[-(self.context_length + 1) : -1]
            inputs.append(tokens)
            first_columns.append(len(tokens) - len(continuation))
            continuations.append(continuation)
        hidden = self._run(self._pad(inputs))
        return list(map(_add_up, self._read_rows(hidden, first_columns, continuations)))

    # Several continuations of one context: the context once, its keys and values repeated for each
    # continuation.

    def _batches_of_shared(
        self, requests: Sequence[Request], shared: list[list[int]]
    ) -> Iterator[list[int]]:
        """Yield requests whose contexts have one length.

        Keys and values of such contexts stack without padding, hence without a mask.

        Args:
            shared: the requests of each context.
        """

        def context_length(indices: list[int]) -> int:
            return len(requests[indices[0]].context)

        batch: list[int] = []
        length = contexts = widest = 0
        for indices in sorted(shared, key=context_length, reverse=True):
            longest = max(len(requests[i].continuation) for i in indices)
            rows = len(batch) + len(indices)
            widest = max(widest, longest)
            if batch and (
                context_length(indices) != length
                or (contexts + 1) * length > self.batch_tokens
                or rows * widest > self.batch_tokens
                # Repeated keys and values: about 70 kB a token at 117M parameters.
                or rows * (length + widest) > 4 * self.batch_tokens
            ):
                yield batch
                batch = []
                contexts = 0
                widest = longest
            length = context_length(indices)
            contexts += 1
            batch += indices
        if batch:
            yield batch

    def _score_shared(self, requests: Sequence[Request]) -> list[Score]:
        contexts: list[TokenIds] = []
        context_rows = []
        continuations = []
        for context, continuation in requests:
            if not contexts or context != contexts[-1]:
                contexts.append(context)
            context_rows.append(len(contexts) - 1)
            continuations.append(continuation)

        caches = self.model.new_caches()
        hidden = self._run(self._pad(contexts), caches)
        # The first token of every continuation is predicted by its context's last position.
        last = len(contexts[0]) - 1
        firsts = self._read(hidden[context_rows, last], [tokens[0] for tokens in continuations])
        scores = [[first] for first in firsts]

        longer = [n for n, tokens in enumerate(continuations) if len(tokens) > 1]
        if longer:
            repeated = self._repeat(caches, [context_rows[n] for n in longer])
            hidden = self._run(self._pad([continuations[n][:-1] for n in longer]), repeated)
            rests = [continuations[n][1:] for n in longer]
            read = self._read_rows(hidden, [0] * len(longer), rests)
            for n, rest in zip(longer, read, strict=True):
                scores[n] += rest
        return list(map(_add_up, scores))

    def _repeat(self, caches: Sequence[KeyValueCache], rows: list[int]) -> list[KeyValueCache]:
        """Copy each cache with the given rows, of which a row may come several times."""
        chosen = torch.tensor(rows, device=self.device)
        repeated = []
        for cache in caches:
            assert cache.keys is not None and cache.values is not None
            copy = KeyValueCache()
            copy.extend(cache.keys[chosen], cache.values[chosen])
            repeated.append(copy)
        return repeated

    # The model.

    def _pad(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Return token ids (sequences, longest), padded on the right with token 0, whose outputs
        are not read."""
        longest = max(len(tokens) for tokens in sequences)
        padded = [[*tokens, *[0] * (longest - len(tokens))] for tokens in sequences]
        return torch.tensor(padded, device=self.device)

    def _run(self, tokens: Tensor, caches: Sequence[KeyValueCache] | None = None) -> Tensor:
        """Compute the residual stream after the last block, (sequences, tokens, n_embd)."""
        with self.autocast(), attention_kernels(self.device, same_shape=False):
            if caches is None and self.compiled_hidden is not None:
                return self.compiled_hidden(tokens)
            return self.model.hidden(tokens, caches)

    def _read_rows(
        self, hidden: Tensor, first_columns: Sequence[int], targets: Sequence[Sequence[int]]
    ) -> list[list[Score]]:
        """Score each row's targets, each by itself; row i's stand from `first_columns[i]` on.

        Args:
            hidden: (rows, tokens, n_embd).
        """
        rows = []
        columns = []
        flat = []
        for row, (column, tokens) in enumerate(zip(first_columns, targets, strict=True)):
            for offset, token in enumerate(tokens):
                rows.append(row)
                columns.append(column + offset)
                flat.append(token)
        scores = iter(self._read(hidden[rows, columns], flat))
        return [list(islice(scores, len(tokens))) for tokens in targets]

    def _read(self, hidden: Tensor, targets: list[int]) -> list[Score]:
        """Score each target token by itself; hidden is (targets, n_embd)."""
        scores: list[Score] = []
        target_ids = torch.tensor(targets, device=self.device)
        for start in range(0, len(targets), HEAD_POSITIONS):
            logits = self.model.head(hidden[start : start + HEAD_POSITIONS].float())
            part = target_ids[start : start + HEAD_POSITIONS]
            logprobs = logits.gather(1, part[:, None])[:, 0] - logits.logsumexp(1)
            scores += map(Score, logprobs.tolist(), (logits.argmax(1) == part).tolist())
        return scores


def _add_up(scores: Iterable[Score]) -> Score:
    """Add up the scores of a continuation's tokens."""
    logprobs, greedy = zip(*scores, strict=True)
    return Score(sum(logprobs), all(greedy))


def windows(tokens: Sequence[int], length: int, stride: int, prefix: int | None) -> list[Request]:
    """Cut a text into requests that predict each token once, with at most `length` inputs each.

    The first window predicts up to `length` tokens. Each later one predicts the next `stride`, with
    as much left context as fits. With stride = length this is the harness's rolling likelihood:
    only the last window has more context.

    Args:
        prefix: token before the first one, end-of-text; None: the first token is context and is not
            predicted.

    Raises:
        ValueError: the stride is not in 1..length.
    """
    if not 1 <= stride <= length:
        raise ValueError(f"stride {stride} is not in 1..{length}")
    stream = tuple(tokens) if prefix is None else (prefix, *tokens)
    requests = []
    done = 1  # stream[:done] is predicted, or context
    while done < len(stream):
        predicted = length if done == 1 else stride
        end = min(done + predicted, len(stream))
        start = max(0, end - 1 - length)
        requests.append(Request(stream[start:done], stream[done:end]))
        done = end
    return requests
