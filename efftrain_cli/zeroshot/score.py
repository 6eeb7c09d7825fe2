"""Compute log-probabilities of continuations, in batches of similar length.

Contexts that several requests share are computed once, and only positions whose logits are read go through the head.
Padding on the right is safe: no position of a causal model depends on later ones. Logits are computed in fp32 over the
vocabulary without its padding, whatever type the blocks compute in: rounding there changes the most likely token.
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

HEAD_POSITIONS = 1024
"""Positions that go through the head at once: fp32 logits of 1024 x 50257 are 206 MB."""
SECONDS_BETWEEN_LINES = 30.0
"""Seconds between two lines of progress where there is no terminal."""


class Request(NamedTuple):
    """A continuation to score after a context; neither is empty."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


class Score(NamedTuple):
    """Natural log of p(continuation | context), and whether greedy decoding gives the continuation."""

    logprob: float
    greedy: bool


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Indices of requests that go through the model together; one of the two fields is empty."""

    alone: Sequence[int] = ()
    """Requests that are one plain sequence each."""
    shared: Sequence[tuple[tuple[int, ...], list[int]]] = ()
    """Contexts of equal length, each with the requests that continue it."""

    def __len__(self) -> int:
        return len(self.alone) + sum(len(asked) for _, asked in self.shared)


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
        """Show progress on standard error; yield a function to call with what each batch has added."""
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
        """Return whether this request's context loses its beginning. The last token is never an input."""
        return len(request.context) + len(request.continuation) - 1 > self.context_length

    def score(self, requests: Sequence[Request], task: str = "scoring") -> list[Score]:
        """Return scores in the order of `requests`, with progress on stderr under the name `task`.

        Raises:
            ValueError: a context or continuation is empty, or a continuation is longer than the context length.
        """
        batches = self.distributed.deal(self._batches(requests))
        scores: list[tuple[int, Score]] = []
        total = sum(map(len, batches))
        with self.progress(f"{task} requests", total) as advance, torch.inference_mode():
            for batch in batches:
                if batch.alone:
                    scores += self._score_alone(requests, batch.alone)
                else:
                    scores += self._score_shared(requests, batch.shared)
                advance(len(batch))
        gathered = self.distributed.gather(task, requests, scores)
        by_index = {i: Score(*score) for i, score in gathered}
        return [by_index[i] for i in range(len(requests))]

    def _batches(self, requests: Sequence[Request]) -> list[Batch]:
        """Divide all requests into batches, the longest first in each of the two kinds."""
        by_context: dict[tuple[int, ...], list[int]] = {}
        alone: list[int] = []
        for i, request in enumerate(requests):
            if not request.context or not request.continuation:
                raise ValueError(f"request {i} has an empty context or continuation")
            if len(request.continuation) > self.context_length:
                raise ValueError(
                    f"a continuation of {len(request.continuation)} tokens does not fit {self.context_length} positions"
                )
            if self.is_truncated(request):
                alone.append(i)
            else:
                by_context.setdefault(request.context, []).append(i)
        # A context with one continuation is one plain sequence; the cache pays only where it is read twice.
        shared = {context: asked for context, asked in by_context.items() if len(asked) > 1}
        alone += [asked[0] for asked in by_context.values() if len(asked) == 1]
        return [
            *(Batch(shared=batch) for batch in self._batches_of_shared(requests, shared)),
            *(Batch(alone=indices) for indices in self._batches_of_alone(requests, alone)),
        ]

    # Requests one by one: (context + continuation) as one sequence.

    def _batches_of_alone(
        self, requests: Sequence[Request], indices: list[int]
    ) -> Iterator[list[int]]:
        def input_length(i: int) -> int:
            return min(
                len(requests[i].context) + len(requests[i].continuation) - 1, self.context_length
            )

        batch: list[int] = []
        for i in sorted(indices, key=input_length, reverse=True):
            if batch and (len(batch) + 1) * input_length(batch[0]) > self.batch_tokens:
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    def _score_alone(
        self, requests: Sequence[Request], indices: Sequence[int]
    ) -> list[tuple[int, Score]]:
        inputs = []
        first_columns = []
        continuations = []
        for i in indices:
            context, continuation = requests[i]
            tokens = (context + continuation)[-(self.context_length + 1) : -1]
            inputs.append(tokens)
            first_columns.append(len(tokens) - len(continuation))
            continuations.append(continuation)

        hidden = self._run(self._pad(inputs))
        by_request = self._read_rows(hidden, first_columns, continuations)
        return [(i, _add_up(scores)) for i, scores in zip(indices, by_request, strict=True)]

    # Several continuations of one context: the context once, its keys and values repeated for each continuation.

    def _batches_of_shared(
        self, requests: Sequence[Request], shared: dict[tuple[int, ...], list[int]]
    ) -> Iterator[list[tuple[tuple[int, ...], list[int]]]]:
        """Yield contexts of equal length: their keys and values stack without padding, hence without a mask."""
        batch: list[tuple[tuple[int, ...], list[int]]] = []
        widest = rows = 0
        for context, asked in sorted(shared.items(), key=lambda item: len(item[0]), reverse=True):
            longest = max(len(requests[i].continuation) for i in asked)
            rows += len(asked)
            widest = max(widest, longest)
            if batch and (
                len(context) != len(batch[0][0])
                or (len(batch) + 1) * len(context) > self.batch_tokens
                or rows * widest > self.batch_tokens
                # Repeated keys and values: about 70 kB a token at 117M parameters.
                or rows * (len(context) + widest) > 4 * self.batch_tokens
            ):
                yield batch
                batch = []
                rows = len(asked)
                widest = longest
            batch.append((context, asked))
        if batch:
            yield batch

    def _score_shared(
        self, requests: Sequence[Request], batch: Sequence[tuple[tuple[int, ...], list[int]]]
    ) -> list[tuple[int, Score]]:
        indices: list[int] = []
        context_rows: list[int] = []
        for row, (_, asked) in enumerate(batch):
            indices += asked
            context_rows += [row] * len(asked)
        continuations = [requests[i].continuation for i in indices]

        caches = self.model.new_caches()
        hidden = self._run(self._pad([context for context, _ in batch]), caches)
        # The first token of every continuation is predicted by its context's last position.
        last = len(batch[0][0]) - 1
        firsts = self._read(hidden[context_rows, last], [tokens[0] for tokens in continuations])
        by_request = [[score] for score in firsts]

        longer = [n for n, tokens in enumerate(continuations) if len(tokens) > 1]
        if longer:
            repeated = self._repeat(caches, [context_rows[n] for n in longer])
            hidden = self._run(self._pad([continuations[n][:-1] for n in longer]), repeated)
            rests = [continuations[n][1:] for n in longer]
            read = self._read_rows(hidden, [0] * len(longer), rests)
            for n, scores in zip(longer, read, strict=True):
                by_request[n] += scores
        return [(i, _add_up(scores)) for i, scores in zip(indices, by_request, strict=True)]

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
        """Return token ids (sequences, longest), padded on the right with token 0, whose outputs are not read."""
        longest = max(len(tokens) for tokens in sequences)
        return torch.tensor(
            [[*tokens, *[0] * (longest - len(tokens))] for tokens in sequences], device=self.device
        )

    def _run(self, tokens: Tensor, caches: Sequence[KeyValueCache] | None = None) -> Tensor:
        """Compute the residual stream after the last block, (sequences, tokens, n_embd)."""
        with self.autocast(), attention_kernels(self.device, same_shape=False):
            if caches is None and self.compiled_hidden is not None:
                return self.compiled_hidden(tokens)
            return self.model.hidden(tokens, caches)

    def _read_rows(
        self, hidden: Tensor, first_columns: Sequence[int], targets: Sequence[Sequence[int]]
    ) -> list[list[Score]]:
        """Score each row's targets, each by itself; those of row i stand from `first_columns[i]` on.

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
    """Cut a text into requests that predict each token exactly once, with at most `length` inputs each.

    The first window predicts up to `length` tokens. Each later one predicts the next `stride`, with as much left
    context as fits. With stride = length this is the harness's rolling likelihood: only the last window has more
    context.

    Args:
        prefix: token before the first one, end-of-text; None: the first token is context and is not predicted.

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
