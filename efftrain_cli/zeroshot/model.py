"""Answer the requests of lm-evaluation-harness with a GPT.

Every request becomes windows: at most `context_length` inputs, whose last outputs predict the
tokens that are asked for. Padding on the right is safe: no position of a causal model depends on
later ones. Logits are computed in fp32, as rounding would change the most likely token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from efftrain_cli.data.tokenizer import Tokenizer
from efftrain_cli.foundation.console import silent
from efftrain_cli.model.generate import GREEDY, generate
from efftrain_cli.model.gpt import GPT
from efftrain_cli.model.kernels import attention_kernels
from efftrain_cli.training import dist

Ids = list[int]
Prompt = tuple[int, Ids]
"""Number of a request, and the text to continue."""
Answer = tuple[int, str]
"""Number of a request, and the text that continues it."""
Score = tuple[float, bool]
"""Log-probability of tokens in nats, and whether greedy decoding gives them."""
HEAD_POSITIONS = 1024
"""Positions that go through the head at once: logits of 1024 x 50,257 are 206 MB."""
UNSCORED = (math.nan, False)
"""Score of a continuation that is not scored."""


class Window(NamedTuple):
    """Inputs of a forward pass, and the tokens that its last outputs predict."""

    request: int
    """Number of the request that the window belongs to."""
    inputs: tuple[int, ...]
    targets: Ids


@dataclass(kw_only=True, eq=False)
class HarnessModel(LM):  # type: ignore[misc]  # the harness has no annotations
    """A GPT as the harness sees it, with counts of what its requests lost."""

    model: GPT
    tokenizer: Tokenizer
    context_length: int
    """Most inputs of a window."""
    stride: int | None = None
    """Tokens that each later window of a whole text predicts; None: `context_length`."""
    batch_tokens: int
    """Most tokens of a forward pass, padding included."""
    bf16: bool = False
    """Whether the blocks compute in bf16."""
    truncated: int = 0
    """Requests whose context lost its beginning."""
    boundary_mismatches: int = 0
    """Requests whose context's tokens are not the beginning of the whole text's."""

    def __post_init__(self) -> None:
        super().__init__()

    def loglikelihood(self, requests: list[Instance]) -> list[Score]:
        """Score continuations after contexts; a long context loses its beginning.

        All requests of an item are `UNSCORED` if a continuation of the item has no tokens, or more
        than the context.
        """
        length = self.context_length
        items = [request.doc_id for request in requests]
        pairs = list(self._encode_pairs(requests))
        unscored = set()
        for number, (_, continuation) in enumerate(pairs):
            tokens = len(continuation)
            if tokens == 0 or tokens > length:
                unscored.add(items[number])

        windows = []
        for number, (context, continuation) in enumerate(pairs):
            if items[number] in unscored:
                continue
            stream = context + continuation
            # The last token is never an input.
            inputs = stream[:-1]
            if len(inputs) > length:
                self.truncated += 1
            windows.append(Window(number, tuple(inputs[-length:]), continuation))
        return self._score(windows, len(requests))

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Score whole texts, each after an end-of-text token."""
        length = self.context_length
        stride = self.stride or length
        context = length - stride + 1
        end = self.tokenizer.eot_id
        texts = [request.args[0] for request in requests]
        windows = []
        for number, ids in enumerate(self._encode(texts)):
            pairs = get_rolling_token_windows(
                ids,
                end,
                length,
                context,
            )
            for inputs, targets in pairs:
                window = Window(number, tuple(inputs), targets)
                windows.append(window)
        scores = self._score(windows, len(requests))
        return [logprob for logprob, _ in scores]

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Write greedy text up to a stop string, end-of-text or the token limit.

        Raises:
            ValueError: the task asks for sampled text.
        """
        # The settings are the task's: all of its requests have the same.
        settings = normalize_gen_kwargs(requests[0].args[1])
        if settings["do_sample"]:
            raise ValueError("the task asks for sampled text; only greedy text can be repeated")
        end = self.tokenizer.eot_id
        end_text = self.tokenizer.decode([end])
        until = [*settings["until"], end_text]
        # Room for all tokens that a task allows would leave none for the question.
        limit = min(settings["max_gen_toks"], self.context_length // 2)
        room = self.context_length - limit

        # Prompts of one length need no padding, which would have to be masked.
        texts = [request.args[0] for request in requests]
        by_length: dict[int, list[Prompt]] = {}
        for number, ids in enumerate(self._encode(texts)):
            if len(ids) > room:
                self.truncated += 1
            kept = ids[-room:] or [end]
            same_length = by_length.setdefault(len(kept), [])
            same_length.append((number, kept))
        batches = []
        for length, prompts in by_length.items():
            rows = max(1, self.batch_tokens // (length + limit))
            for start in range(0, len(prompts), rows):
                batches.append(prompts[start : start + rows])

        def write(batch: list[Prompt]) -> list[Answer]:
            return self._write(batch, limit, until)

        answers = dict(self._divide(batches, write))
        return [answers[number] for number in range(len(requests))]

    def _encode(self, texts: list[str]) -> list[Ids]:
        encoded = self.tokenizer.encode(texts)
        return [ids.tolist() for ids in encoded]

    def _encode_pairs(
        self,
        requests: list[Instance],
    ) -> Iterator[tuple[Ids, Ids]]:
        """Encode contexts with their continuations and split the tokens, as the harness does."""
        # Spaces at the border belong to the continuation: tokens begin with them.
        starts = [request.args[0].rstrip() for request in requests]
        wholes = ["".join(request.args) for request in requests]
        contexts = self._encode(starts)
        streams = self._encode(wholes)
        for number, context in enumerate(contexts):
            stream = streams[number]
            border = len(context)
            continuation = stream[border:]
            if stream[:border] != context:
                self.boundary_mismatches += 1
            if not continuation:
                # A token spans the border (lm-evaluation-harness, pull request 4055).
                text = wholes[number].removeprefix(starts[number])
                (continuation,) = self._encode([text])
            yield context or [self.tokenizer.eot_id], continuation

    def _divide(
        self,
        batches: Sequence[Any],
        compute: Callable[[Any], list[Any]],
    ) -> list[Any]:
        """Compute this rank's batches; return the answers of all ranks."""
        first = dist.rank()
        mine = batches[first :: dist.world_size()]
        answers = []
        for batch in tqdm(mine, disable=silent() or None):
            answers += compute(batch)
        gathered = []
        for part in dist.gather_objects(answers):
            gathered += part
        return gathered

    def _score(
        self,
        windows: Sequence[Window],
        requests: int,
    ) -> list[Score]:
        """Add up the windows' scores by request."""
        sums: dict[int, Score] = {}
        batches = batch_windows(windows, self.batch_tokens)
        for request, logprob, is_greedy in self._divide(batches, self._score_batch):
            before, all_greedy = sums.get(request, (0.0, True))
            sums[request] = (
                before + logprob,
                all_greedy and is_greedy,
            )
        return [sums.get(request, UNSCORED) for request in range(requests)]

    @torch.inference_mode()
    def _score_batch(
        self,
        batch: Sequence[Window],
    ) -> list[tuple[int, float, bool]]:
        """Return (request, log-probability, whether greedy) of each window."""
        rows: dict[tuple[int, ...], int] = {}
        for window in batch:
            rows.setdefault(window.inputs, len(rows))
        hidden = self._hidden(list(rows))
        outputs = []
        targets = []
        for _, inputs, wanted in batch:
            last = len(inputs)
            outputs.append(hidden[rows[inputs], last - len(wanted) : last])
            targets += wanted

        # The head's weights are read once for many windows.
        logprobs = []
        is_greedy = []
        ids = torch.tensor(targets, device=hidden.device)
        for x, chosen in zip(
            torch.cat(outputs).split(HEAD_POSITIONS),
            ids.split(HEAD_POSITIONS),
            strict=True,
        ):
            logits = self.model.head(x.float())
            of_chosen = logits.gather(1, chosen[:, None])[:, 0]
            logprobs.append((of_chosen - logits.logsumexp(-1)).double())
            is_greedy.append(logits.argmax(-1) == chosen)

        lengths = [len(window.targets) for window in batch]
        of_windows = zip(
            batch,
            torch.cat(logprobs).split(lengths),
            torch.cat(is_greedy).split(lengths),
            strict=True,
        )
        scores = []
        for window, logprob, greedy in of_windows:
            score = (window.request, float(logprob.sum()), bool(greedy.all()))
            scores.append(score)
        return scores

    def _hidden(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Compute the residual stream after the last block: (sequences, tokens, n_embd)."""
        device = self.model.device
        rows = [torch.tensor(ids) for ids in sequences]
        tokens = pad_sequence(rows, batch_first=True).to(device)
        with self._autocast(), attention_kernels(device, same_shape=False):
            return self.model.hidden(tokens)

    def _autocast(self) -> AbstractContextManager[object]:
        kind = self.model.device.type
        return torch.autocast(
            kind,
            torch.bfloat16,
            enabled=self.bf16,
        )

    def _write(
        self,
        batch: list[Prompt],
        limit: int,
        until: list[str],
    ) -> list[Answer]:
        """Continue numbered prompts of one length greedily, up to a stop string."""
        numbers = [number for number, _ in batch]
        prompts = [prompt for _, prompt in batch]
        tokens = torch.tensor(prompts, device=self.model.device)
        columns: list[list[int]] = []
        answers: list[str] = []
        with self._autocast():
            generated = generate(
                self.model,
                tokens,
                GREEDY,
                self.context_length,
            )
            for column in islice(generated, limit):
                columns.append(column.tolist())
                answers = []
                is_open = False
                for row in zip(*columns, strict=True):
                    text = self.tokenizer.decode(row)
                    answer = postprocess_generated_text(text, until, None)
                    # A text with a stop string is cut there.
                    is_open = is_open or answer == text
                    answers.append(answer)
                if not is_open:
                    break
        return list(zip(numbers, answers, strict=True))


def batch_windows(
    windows: Iterable[Window],
    batch_tokens: int,
) -> list[list[Window]]:
    """Divide windows into batches, the longest first, equal inputs side by side."""

    def key(window: Window) -> tuple[int, tuple[int, ...]]:
        return -len(window.inputs), window.inputs

    batches: list[list[Window]] = [[]]
    for window in sorted(windows, key=key):
        batch = batches[-1]
        if batch:
            # The first window of a batch is its longest.
            longest = len(batch[0].inputs)
            rows = len(batch) + 1
            if rows * longest > batch_tokens:
                batch = []
                batches.append(batch)
        batch.append(window)
    return batches
