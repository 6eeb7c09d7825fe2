"""Windows: each exactly once per epoch, the same from anywhere, cut in one place."""

from __future__ import annotations

import hashlib
import math
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from efftrain_cli.data import windows as windows_module
from efftrain_cli.data.corpus import ShardWriter, TokenShards
from efftrain_cli.data.windows import Windows, frequency_loss
from efftrain_cli.foundation.errors import DataError, RecipeError
from efftrain_cli.foundation.step import StepPlan
from efftrain_cli.recipe.sections import Data


def counting_shards(folder: Path, tokens: int, *, shard_tokens: int = 1 << 26) -> TokenShards:
    """Shards whose token at place i is i: a window shows where it was cut. Vocabulary above the
    count, so nothing wraps."""
    folder.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(folder / "train.bin", vocab_size=tokens + 1)
    for start in range(0, tokens, shard_tokens):
        writer.add(np.arange(start, min(start + shard_tokens, tokens)))
        writer.close()
    return TokenShards(writer.path, writer.split, tokens + 1)


def plan(batch_size: int, seq_len: int, start: int, sequences_per_window: int = 1) -> StepPlan:
    return StepPlan(1, 0.0, batch_size, seq_len, 1, start, sequences_per_window, (), False)


def mixed(x: int) -> int:
    """SplitMix64's finalizer (Steele, Lea and Flood 2014) in Python's own integers."""
    x %= 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def place(position: int, n: int, seq_len: int, seed: int) -> int:
    """Where a window begins: 8 rounds of a Feistel network, again while they leave 0 .. n-1."""
    epoch, number = divmod(position, n)
    names = [f"windows {seed} {epoch} {part}" for part in range(3)]
    content = b"".join(hashlib.sha256(name.encode()).digest() for name in names)
    *keys, shift = struct.unpack("<9Q", content[:72])
    bits = max(2, (n - 1).bit_length())
    while True:
        wide, narrow = bits - bits // 2, bits // 2
        left, right = divmod(number, 2**narrow)
        for key in keys:
            left, right = right, left ^ mixed(right + key) % 2**wide
            wide, narrow = narrow, wide
        number = left * 2**narrow + right
        if number < n:
            return shift % seq_len + number * seq_len


def test_the_order_is_that_of_its_definition(tmp_path, monkeypatch):
    """F8: from any position, for any seed; a later version continues with the same windows."""
    assert mixed(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # of SplittableRandom(0)
    monkeypatch.setattr(windows_module, "_BLOCK", 64)
    for n, first in ((1, 0), (2, 0), (4, 0), (600, 550)):
        windows = Windows(counting_shards(tmp_path / str(n), 8 * n + 8), 8, seed=n)
        expected = [place(position, n, 8, seed=n) for position in range(first, first + 100)]
        assert windows.starts(first, 100).tolist() == expected
    epochs = np.sort(windows.starts(0, 3 * n).reshape(3, n))
    assert (np.diff(epochs) == 8).all(), "each window once per epoch"
    assert len({*epochs[:, 0]}) > 1, "and the cut moves"


@pytest.mark.parametrize(("each", "length"), [(1, 24), (2, 24), (4, 16)])
def test_windows_are_cut_into_sequences_from_their_beginning(tmp_path, each, length):
    """7 sequences: of 7 windows, the rest dropped; of 4, the last half used; of 2, all of each."""
    windows = Windows(counting_shards(tmp_path, 5000), 64, seed=3)
    full = windows.shards.read(windows.starts(20, 7), 65)
    batch = windows.batch(plan(7, length, 20, sequences_per_window=each))
    assert batch.tokens.is_contiguous() and batch.targets.is_contiguous()
    for number in range(7):
        begin = number % each * length
        row = full[number // each][begin : begin + length + 1].tolist()
        assert batch.tokens[number].tolist() == row[:-1]
        assert batch.targets[number].tolist() == row[1:]


@pytest.mark.parametrize(("sequences_per_window", "world_size"), [(1, 2), (3, 4)])
def test_ranks_share_the_batch(tmp_path, sequences_per_window, world_size):
    windows = Windows(counting_shards(tmp_path, 5000), 64, seed=3)
    step = plan(11, 20, 5, sequences_per_window)._replace(accumulation_steps=world_size)
    shares = [windows.batch(step, rank, world_size).tokens.tolist() for rank in range(world_size)]
    assert [row for share in shares for row in share] == windows.batch(step).tokens.tolist()
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_rank_without_a_sequence_gets_none_wherever_the_step_begins(tmp_path):
    windows = Windows(counting_shards(tmp_path, 5000), 64, seed=3)
    step = plan(5, 20, 4096 - 5)._replace(accumulation_steps=8)
    assert [len(windows.batch(step, rank, 4).tokens) for rank in range(4)] == [2, 2, 1, 0]


def test_a_window_holds_the_sequences_that_are_cut_from_it(tmp_path):
    windows = Windows(counting_shards(tmp_path, 5000), 64, seed=3)
    with pytest.raises(ValueError, match="4 sequences of 17 tokens do not fit into a window of 64"):
        windows.batch(plan(7, 17, 20, sequences_per_window=4))


def test_validation_is_fixed_spread_and_without_overlap(tmp_path):
    shards = counting_shards(tmp_path, 5001)
    rows = Windows(shards, 64, seed=1).validation(10)
    assert rows.tolist() == Windows(shards, 64, seed=2).validation(10).tolist()
    starts = rows[:, 0].tolist()
    assert starts[0] == 0 and starts[-1] + 65 == 5001
    gaps = np.diff(starts)
    assert gaps.min() >= 64 and gaps.max() - gaps.min() <= 1
    assert rows.shape == (10, 65) and str(rows.dtype) == "torch.int64"
    assert Windows(shards, 64, seed=1).validation_starts(2) == [0, 5001 - 65]
    # Fewer where the text is short.
    assert len(Windows(shards, 64, seed=1).validation(1000)) == 5000 // 64
    assert Windows(shards, 5000, seed=1).validation_starts(9) == [0]
    with pytest.raises(DataError, match="validation text has 5,001 tokens"):
        Windows(shards, 5001, seed=1).validation(1)


def test_a_corpus_too_short_for_a_window_is_refused(tmp_path):
    windows = Windows(counting_shards(tmp_path, 127), 64, seed=1)
    with pytest.raises(DataError, match=r"127 tokens.*at least 128"):
        windows.starts(0, 1)
    assert Windows(counting_shards(tmp_path / "b", 128), 64, seed=1).per_epoch == 1


def test_a_budget_of_more_than_one_epoch_needs_permission(tmp_path):
    """F37"""
    windows = Windows(counting_shards(tmp_path, 64 * 101), 64, seed=1)
    assert windows.check_budget(100, Data()) == 1.0
    with pytest.raises(RecipeError) as refused:
        windows.check_budget(250, Data())
    assert str(refused.value) == (
        "the budget needs 2.50 epochs: 250 windows of 64 tokens, and the corpus has 100\n"
        "  set data.repeat = true to read it more than once, divide train.tokens by 3,"
        " or give more text (data.train)"
    )
    assert refused.value.exit_code == 2
    assert windows.check_budget(250, Data(repeat=True)) == 2.5


def test_frequencies_are_counted_at_evenly_spread_places(tmp_path, monkeypatch):
    """64 places of 2 tokens in 65: all but the first and the last are counted twice, of 66 kinds
    each once more."""
    monkeypatch.setattr(windows_module, "COUNTED", 128)
    loss = frequency_loss(counting_shards(tmp_path, 65), torch.tensor([[5, 0, 65, 7]]), 66)
    assert loss == pytest.approx(math.log(128 + 66) - math.log(2 * 1 * 3) / 3)
