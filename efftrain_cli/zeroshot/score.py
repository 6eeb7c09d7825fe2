"""Compute log-probabilities of continuations, in batches of similar length.

A context that several requests share is computed once. Only positions whose logits are read go
through the head. Padding on the right is safe: no position of a causal model depends on later ones.
Logits are computed in fp32, over the vocabulary without its padding, even if the blocks compute in
bf16: rounding would change the most likely token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from efftrain_cli.foundation.console import silent
from efftrain_cli.foundation.progress import show_progress
from efftrain_cli.model.gpt import GPT, KeyValueCache
from efftrain_cli.model.kernels import attention_kernels
from efftrain_cli.zeroshot.distributed import DistributedEval

TokenIds = tuple[int, ...]
HEAD_POSITIONS = 1024
"""Positions that go through the head at once: fp32 logits of 1024 x 50257 are 206 MB."""
SECONDS_BETWEEN_LINES = 30.0
"""Seconds between two lines of progress if standard error is no terminal."""


class Request(NamedTuple):
    """A continuation to score after a context; neither is empty."""

    context: TokenIds
    continuation: TokenIds


class Score(NamedTuple):
    """Score of a continuation."""

    logprob: float
    """Natural logarithm of p(continuation | context)."""
    greedy: bool
    """Whether greedy decoding gives the continuation."""


class _Batch(NamedTuple):
    """Requests that go through the model together."""

    indices: list[int]
    """Numbers of the requests."""
    shares_contexts: bool
    """Whether several requests continue one context.

    Requests with equal contexts are then neighbours, and all contexts have one length.
    """


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """A GPT with the settings of its evaluation."""

    model: GPT
    context_length: int
    """Most input tokens; longer inputs lose their beginning."""
    batch_tokens: int = 4096
    """Most tokens in one forward pass, padding included."""
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
        """Show progress on standard error; yield a function that adds to the number done."""
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
        """Return whether the request's context loses its beginning."""
        # The last token is never an input.
        inputs = len(request.context) + len(request.continuation) - 1
        return inputs > self.context_length

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

        # A context with one continuation needs no cache: both are one sequence.
        shared = []
        for indices in by_context.values():
            if len(indices) > 1:
                shared.append(indices)
            else:
                alone += indices
        batches = [_Batch(indices, True) for indices in self._batches_of_shared(requests, shared)]
        batches += [_Batch(indices, False) for indices in self._batches_of_alone(requests, alone)]
        return batches

    # Requests one by one: (context + continuation) as one sequence.

    def _batches_of_alone(
        self, requests: Sequence[Request], indices: list[int]
    ) -> Iterator[list[int]]:
        def input_length(i: int) -> int:
            context, continuation = requests[i]
            return min(len(context) + len(continuation) - 1, self.context_length)

        batch: list[int] = []
        for i in sorted(indices, key=input_length, reverse=True):
            # The first request of a batch is its longest.
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
            # The last `context_length` tokens before the one that is predicted last.
            tokens = (context + continuation)[-(self.context_length + 1) : -1]
            inputs.append(tokens)
            first_columns.append(len(tokens) - len(continuation))
            continuations.append(continuation)
        hidden = self._run(self._pad(inputs))
        scores = self._read_rows(hidden, first_columns, continuations)
        return [_sum_scores(of_tokens) for of_tokens in scores]

    # Continuations of one context: compute it once, repeat its keys and values for each.

    def _batches_of_shared(
        self, requests: Sequence[Request], shared: list[list[int]]
    ) -> Iterator[list[int]]:
        """Yield requests whose contexts have one length.

        Keys and values of such contexts stack without padding, hence without a mask.

        Args:
            shared: numbers of the requests of each context.
        """

        def context_length(indices: list[int]) -> int:
            return len(requests[indices[0]].context)

        batch: list[int] = []
        length = 0
        n_contexts = 0
        longest = 0
        for indices in sorted(shared, key=context_length, reverse=True):
            longest_here = max(len(requests[i].continuation) for i in indices)
            longest = max(longest, longest_here)
            rows = len(batch) + len(indices)
            is_full = (
                context_length(indices) != length
                or (n_contexts + 1) * length > self.batch_tokens
                or rows * longest > self.batch_tokens
                # Repeated keys and values: about 70 kB a token at 117M parameters.
                or rows * (length + longest) > 4 * self.batch_tokens
            )
            if batch and is_full:
                yield batch
                batch = []
                n_contexts = 0
                longest = longest_here
            length = context_length(indices)
            n_contexts += 1
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
        first_tokens = [tokens[0] for tokens in continuations]
        firsts = self._read(hidden[context_rows, last], first_tokens)
        scores = [[first] for first in firsts]

        # The other tokens of a continuation are predicted by the token before each.
        longer = [n for n, tokens in enumerate(continuations) if len(tokens) > 1]
        if longer:
            repeated = self._repeat(caches, [context_rows[n] for n in longer])
            inputs = [continuations[n][:-1] for n in longer]
            targets = [continuations[n][1:] for n in longer]
            hidden = self._run(self._pad(inputs), repeated)
            read = self._read_rows(hidden, [0] * len(longer), targets)
            for n, rest in zip(longer, read, strict=True):
                scores[n] += rest
        return [_sum_scores(of_tokens) for of_tokens in scores]

    def _repeat(self, caches: Sequence[KeyValueCache], rows: list[int]) -> list[KeyValueCache]:
        """Return copies of the caches with these rows; a row may be repeated."""
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
        """Return token ids (sequences, longest), padded on the right with token 0.

        Outputs of the padding are not read.
        """
        rows = [torch.tensor(tokens) for tokens in sequences]
        return pad_sequence(rows, batch_first=True).to(self.device)

    def _run(self, tokens: Tensor, caches: Sequence[KeyValueCache] | None = None) -> Tensor:
        """Compute the residual stream after the last block, (sequences, tokens, n_embd)."""
        with self.autocast(), attention_kernels(self.device, same_shape=False):
            if caches is None and self.compiled_hidden is not None:
                return self.compiled_hidden(tokens)
            return self.model.hidden(tokens, caches)

    def _read_rows(
        self,
        hidden: Tensor,
        first_columns: Sequence[int],
        targets: Sequence[Sequence[int]],
    ) -> list[list[Score]]:
        """Score each target of each row by itself.

        Args:
            hidden: (rows, tokens, n_embd).
            first_columns: for each row, the token whose output predicts its first target.
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
        parts = zip(hidden.split(HEAD_POSITIONS), target_ids.split(HEAD_POSITIONS), strict=True)
        for inputs, part in parts:
            logits = self.model.head(inputs.float())
            target_logits = logits.gather(1, part[:, None])[:, 0]
            logprobs = target_logits - logits.logsumexp(1)
            is_greedy = logits.argmax(1) == part
            scores += map(Score, logprobs.tolist(), is_greedy.tolist())
        return scores


def _sum_scores(scores: Iterable[Score]) -> Score:
    """Return the score of a continuation, given those of its tokens."""
    logprobs, greedy = zip(*scores, strict=True)
    return Score(sum(logprobs), all(greedy))


def windows(tokens: Sequence[int], length: int, stride: int, prefix: int | None) -> list[Request]:
    """Cut a text into requests of at most `length` inputs that predict each token exactly once.

    The first window predicts up to `length` tokens. Each later one predicts the next `stride`, with
    as much context before them as fits. With stride = length these are the disjoint windows of
    lm-evaluation-harness's rolling log-likelihood.

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
    # stream[:done] is predicted, or context.
    done = 1
    while done < len(stream):
        predicted = length if done == 1 else stride
        end = min(done + predicted, len(stream))
        start = max(0, end - 1 - length)
        requests.append(Request(stream[start:done], stream[done:end]))
        done = end
    return requests
