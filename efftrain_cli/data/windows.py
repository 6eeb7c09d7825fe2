"""Windows: which tokens a training step sees, as a function of the position in the stream of
windows and of nothing else.

The tokens of an epoch are cut into windows of `seq_len` tokens (and one more, the last target), and
the windows are put into an order by a keyed permutation that is computed, not stored: a Feistel
network on the window's number. So any position of any epoch costs the same to find, resuming needs
no state, and each window comes exactly once per epoch.

Several sources are mixed by position too: a fixed pattern of `_MIX` positions says whose window
comes, every source as evenly as its weight allows, and how many of its windows came before says
which one.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from efftrain_cli.data.corpus import Part, TokenShards, apportion
from efftrain_cli.foundation.console import counted
from efftrain_cli.foundation.errors import DataError, RecipeError
from efftrain_cli.foundation.step import Batch, StepPlan

if TYPE_CHECKING:
    from torch import Tensor

    from efftrain_cli.recipe.sections import Data

_ROUNDS = 8
COUNTED = 1 << 22
"""Training tokens whose frequencies are counted."""
_BLOCK = 4096  # stream positions whose places are computed at once
_MIX = 10_000  # positions in the pattern of a mix: weights are met to a ten-thousandth
MANY_EPOCHS = 50
"""From so many epochs on, a warning: the model learns the text by heart."""
FEW_WINDOWS = 8
"""With fewer validation windows than this, a warning: their loss depends on which text they happen
to hold."""


@dataclass
class Windows:
    """The full-length windows of one split of a corpus.

    Raises (from every method that reads the order, not from the constructor, as validation needs no
    order):
        DataError: there are not enough tokens for one window at every shift of the cut.
    """

    shards: TokenShards
    seq_len: int
    """Full context length, in tokens; a window holds one more."""
    seed: int
    """Seed of the order; equal seeds give equal order."""
    pin_memory: bool = False
    """Batches lie in page-locked memory, for copies to a CUDA device."""

    def __post_init__(self) -> None:
        whole = Part("the training text", 1.0, self.shards.tokens)
        self._parts = self.shards.parts or (whole,)
        # One window fewer than fits, so that every epoch's shift of the cut leaves the same number.
        self._windows = [part.tokens // self.seq_len - 1 for part in self._parts]
        self._shares = apportion([part.weight for part in self._parts], _MIX)
        self._pattern = _pattern(self._shares)
        self._cached_block = lru_cache(self._block)

    @property
    def per_epoch(self) -> int:
        """Windows in an epoch; of a mix, those until the first of its sources has been read
        once."""
        whole = []
        for part, windows, share in zip(self._parts, self._windows, self._shares, strict=True):
            if windows < 1:
                raise DataError(
                    f"{part.name} has {part.tokens:,} tokens, too few for windows"
                    f" of {self.seq_len:,} tokens (at least {2 * self.seq_len:,} are needed)\n"
                    "  give more text or a smaller model.seq_len"
                )
            whole.append(windows * _MIX // share)
        return min(whole)

    def epochs(self, windows: int) -> float:
        """Return the epochs that a run of this many windows (`Progress.windows` at its end) makes
        of the corpus; of a mix, of the source that is read most often."""
        return windows / self.per_epoch

    def epochs_of_sources(self, windows: int) -> dict[str, float]:
        """Return the epochs of each source of a mix, by its name; {} if there is one text."""
        if len(self._parts) == 1:
            return {}
        epochs = {}
        for part, share, own in zip(self._parts, self._shares, self._windows, strict=True):
            epochs[part.name] = windows * share / _MIX / own
        return epochs

    def check_budget(self, windows: int, data: Data) -> float:
        """Return `epochs(windows)`, if the recipe allows that many.

        Raises:
            RecipeError: the corpus would be read more than once and `data.repeat` is not set.
        """
        epochs = self.epochs(windows)
        if epochs > 1 and not data.repeat:
            needed = f"{epochs:.2f} epochs"
            if each := self.epochs_of_sources(windows):
                counts = ", ".join(f"{name} {count:.2f}" for name, count in each.items())
                needed += f" of one of the sources ({counts})"
            raise RecipeError(
                f"the budget needs {needed}: {windows:,} windows"
                f" of {self.seq_len:,} tokens, and the corpus has {self.per_epoch:,}\n"
                "  set data.repeat = true to read it more than once,"
                f" divide train.tokens by {int(epochs) + 1:,},"
                " or give more text (data.train)"
            )
        return epochs

    def starts(self, first: int, count: int) -> np.ndarray:
        """Return where the windows at stream positions first .. first+count-1 begin among the
        tokens, int64 (count,)."""
        last = first + max(count, 1) - 1
        blocks = range(first // _BLOCK, last // _BLOCK + 1)
        begin = first - blocks[0] * _BLOCK
        places = np.concatenate([*map(self._cached_block, blocks)])
        return places[begin : begin + count]

    def batch(
        self,
        plan: StepPlan,
        rank: int = 0,
        world_size: int = 1,
    ) -> Batch:
        """Return the sequences of a step, or those of one rank's micro-batches. This is the only
        place that cuts sequences.

        `plan.batch_size` sequences of `plan.seq_len` tokens come from the windows at
        `plan.window_start` on: the first `plan.sequences_per_window` sequences of each window, in
        order. The rest of a window, and what remains of the last one, is dropped.

        Returns:
            tokens and targets, int64 (sequences, plan.seq_len); targets are the tokens one place
            later.
        """
        import torch

        length = plan.seq_len
        each = plan.sequences_per_window
        if length * each > self.seq_len:
            raise ValueError(
                f"{each} sequences of {length} tokens do not fit into a window of {self.seq_len}"
            )
        begin = plan.first_sequence(plan.accumulation_steps * rank // world_size)
        end = plan.first_sequence(plan.accumulation_steps * (rank + 1) // world_size)
        first = begin // each
        after = -(-end // each)
        starts = self.starts(plan.window_start + first, after - first)
        windows, inside = np.divmod(np.arange(begin, end), each)
        ids = self.shards.read(starts[windows - first] + inside * length, length + 1)
        # Copied by numpy: torch would wake its threads for it, which costs more than the copy.
        tokens = torch.from_numpy(np.ascontiguousarray(ids[:, :-1]))
        targets = torch.from_numpy(np.ascontiguousarray(ids[:, 1:]))
        if self.pin_memory:
            tokens = tokens.pin_memory()
            targets = targets.pin_memory()
        return Batch(tokens, targets)

    def validation(self, count: int) -> Tensor:
        """Return fixed windows spread evenly over the tokens, none overlapping another, int64 (n,
        seq_len + 1).

        They depend on the tokens, `seq_len` and `count`, not on the seed. n is `count`, or fewer
        where the text is short; a `DataError` says that not even one fits.
        """
        import torch

        starts = self.validation_starts(count)
        return torch.from_numpy(self.shards.read(starts, self.seq_len + 1))

    def validation_starts(self, count: int) -> list[int]:
        """Return where the windows of `validation` begin; fails as it does."""
        fits = (self.shards.tokens - 1) // self.seq_len
        if fits < 1:
            raise DataError(
                f"the validation text has {self.shards.tokens:,} tokens,"
                f" too few for one window of {self.seq_len:,} and its last target\n"
                "  raise data.valid_fraction, give data.valid more text, or lower model.seq_len"
            )
        starts = []
        base = 0
        weights = [part.weight for part in self._parts]
        shares = apportion(weights, count)
        for part, share in zip(self._parts, shares, strict=True):
            starts += [base + start for start in self._spread(part.tokens, share)]
            base += part.tokens
        return starts or self._spread(self.shards.tokens, 1)

    def _spread(self, tokens: int, count: int) -> list[int]:
        """Return the starts of at most `count` windows over so many tokens, without overlap."""
        count = min(count, (tokens - 1) // self.seq_len)
        room = tokens - 1 - self.seq_len
        gaps = max(count - 1, 1)
        return [number * room // gaps for number in range(count)]

    def _block(self, number: int) -> np.ndarray:
        """Return where the windows of a block of stream positions begin."""
        self.per_epoch  # noqa: B018  raises where there is too little text
        whose, before = self._pattern
        rounds, at = np.divmod(number * _BLOCK + np.arange(_BLOCK), _MIX)
        places = np.empty_like(at)
        base = 0
        for number, part in enumerate(self._parts):
            here = whose[at] == number
            numbers = rounds[here] * self._shares[number] + before[at[here]]
            places[here] = base + self._places_in(number, numbers)
            base += part.tokens
        return places

    def _places_in(
        self,
        part: int,
        numbers: np.ndarray,
    ) -> np.ndarray:
        """Return where the windows of one source with these numbers in its own order begin, counted
        from its first token."""
        per_epoch = self._windows[part]
        epochs = numbers // per_epoch
        places = np.empty_like(numbers)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            text = f"{self.seed} {epoch}"
            if part:
                text += f" source {part}"
            key = _key(text)
            shift = int(key[-1] % np.uint64(self.seq_len))
            order = permute(numbers[here] - epoch * per_epoch, per_epoch, key[:_ROUNDS])
            places[here] = shift + order * self.seq_len
        return places


def data_warnings(
    train: Windows,
    windows: int,
    validation_windows: int,
) -> list[str]:
    """Return what is legal and probably not meant of a run of `windows` windows, as sentences."""
    found = []
    if (epochs := train.epochs(windows)) > MANY_EPOCHS:
        found.append(
            f"the run reads the text {epochs:,.0f} times: it will learn it by heart,"
            " and lower losses then say little. Give more text (data.train) or lower train.tokens"
        )
    if 0 < validation_windows < FEW_WINDOWS:  # without any the run is refused
        found.append(
            f"validation is on {counted(validation_windows, 'window')} only,"
            " so its loss depends on which text they hold:"
            " raise data.valid_fraction or eval.windows, or give data.valid more text"
        )
    return found


def _pattern(shares: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return whose window stands at each of `_MIX` positions, and how many of its own stand before
    it: int64 (_MIX,) twice.

    The j-th of a source's n windows stands near (j + 1/2) / n of the way, so that every beginning
    of the stream holds each source by its share to within a window or two.
    """
    owners = np.repeat(np.arange(len(shares)), shares)
    numbers = np.concatenate([*map(np.arange, shares)])
    keys = (numbers + 0.5) / np.array(shares)[owners]
    order = np.argsort(keys, kind="stable")
    return owners[order], numbers[order]


def permute(
    numbers: np.ndarray,
    n: int,
    key: np.ndarray,
) -> np.ndarray:
    """Apply a permutation of 0 .. n-1, chosen by `key`, to `numbers`.

    A Feistel network permutes the smallest power of two that holds n; numbers that leave the range
    are sent through again until they are back in it (cycle walking; Black and Rogaway, "Ciphers
    with arbitrary finite domains", 2002).

    Args:
        numbers: int64, each in 0 .. n-1.
        key: uint64, one per round; an even number of them.
    """
    bits = max(2, (n - 1).bit_length())
    out = numbers.astype(np.uint64)
    todo = np.arange(len(out))
    while len(todo):
        out[todo] = _feistel(out[todo], bits, key)
        todo = todo[out[todo] >= n]
    return out.astype(np.int64)


def _feistel(
    x: np.ndarray,
    bits: int,
    key: np.ndarray,
) -> np.ndarray:
    """Permute 0 .. 2^bits - 1. The halves may differ by a bit, so they swap widths from round to
    round."""
    width = np.uint64(bits - bits // 2)
    other = np.uint64(bits // 2)
    one = np.uint64(1)
    left = x >> other
    right = x & ((one << other) - one)
    for k in key:
        mask = (one << width) - one
        left, right = right, left ^ (_mix(right + k) & mask)
        width, other = other, width
    return (left << other) | right


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply SplitMix64's finalizer (Steele, Lea and Flood 2014): every bit of x moves every bit of
    the result."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _key(name: str) -> np.ndarray:
    """Return the round keys and, last, the number of the epoch's shift: uint64 (_ROUNDS + 1,)."""
    content = b""
    number = 0
    while len(content) < 8 * (_ROUNDS + 1):
        content += hashlib.sha256(f"windows {name} {number}".encode()).digest()
        number += 1
    return np.frombuffer(content, dtype="<u8")[: _ROUNDS + 1]


def frequency_loss(
    train: TokenShards,
    windows: Tensor,
    vocab_size: int,
) -> float:
    """Return the loss of windows if each token is predicted by its frequency in the training text,
    nats per token.

    Frequencies are those of COUNTED tokens from evenly spread places, one more of each kind.

    Args:
        windows: int64 (n, seq_len + 1); every id but each window's first is a target.
    """
    places = 64
    length = min(train.tokens, COUNTED // places)
    starts = np.linspace(0, train.tokens - length, places)
    ids = train.read(starts.astype(int), length)
    counts = 1 + np.bincount(ids.ravel(), minlength=vocab_size)
    log_shares = np.log(counts / counts.sum())
    targets = windows[:, 1:].numpy()
    return -float(log_shares[targets].mean())
