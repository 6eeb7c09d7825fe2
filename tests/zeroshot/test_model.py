"""Requests of the harness against the plain computation: one at a time, every logit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance

from efftrain_cli.data.tokenizer import Tokenizer, load_tokenizer
from efftrain_cli.model.gpt import GPT
from efftrain_cli.zeroshot.model import HarnessModel, Window
from tests.tiny import config_of
from tests.trained_run import random_gpt

LENGTH = 24


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Letters, with the pairs ab and cd, and no words: a token may span a space's place."""
    from tokenizers import Tokenizer as Backend
    from tokenizers.decoders import Fuse
    from tokenizers.models import BPE

    vocabulary = {"<|endoftext|>": 0, "a": 1, "b": 2, "c": 3, "d": 4, " ": 5, "ab": 6, "cd": 7}
    backend = Backend(BPE(vocab=vocabulary, merges=[("a", "b"), ("c", "d")]))
    backend.decoder = Fuse()
    backend.add_special_tokens(["<|endoftext|>"])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    backend.save(str(path))
    return load_tokenizer(Path(path))


@pytest.fixture(scope="module")
def gpt() -> GPT:
    return random_gpt(config_of(seq_len=LENGTH, vocab_size=8), spread=0.5, seed=7)


def plain_score(gpt: GPT, ids: list[int], first: int) -> float:
    """Log-probability of ids[first:] after the ids before them, of which the last ones fit."""
    cut = ids[-LENGTH - 1 :]
    with torch.no_grad():
        logprobs = gpt(torch.tensor([cut[:-1]]))[0].log_softmax(-1)
    targets = cut[len(cut) - (len(ids) - first) :]
    rows = logprobs[-len(targets) :]
    return sum(float(row[target]) for row, target in zip(rows, targets, strict=True))


def asked(*pairs: tuple[str, str]) -> list[Instance]:
    """Requests of one item each."""
    return [
        Instance("loglikelihood", doc={}, arguments=pair, idx=0, metadata=("t", number, 1))
        for number, pair in enumerate(pairs)
    ]


def test_contexts_and_continuations_are_split_as_the_harness_splits(gpt, tokenizer):
    """Ids by hand: spaces at the border go with what follows; an empty context is end-of-text."""
    cases = [
        (("ac", "ab"), [1, 3, 6], 2),
        (("ac ", "ab"), [1, 3, 5, 6], 2),
        (("", "cd"), [0, 7], 1),
        (("b" * 30, "ca"), [2] * 30 + [3, 1], 30),
        (("c", "a" * 24), [3] + [1] * 24, 1),
    ]
    model = HarnessModel(model=gpt, tokenizer=tokenizer, context_length=LENGTH, batch_tokens=30)
    scores = model.loglikelihood(asked(*(pair for pair, _, _ in cases)))
    for (_, ids, first), (logprob, _) in zip(cases, scores, strict=True):
        assert logprob == pytest.approx(plain_score(gpt, ids, first), abs=1e-5)
    # 32 - 1 inputs are more than 24; 25 - 1 are not.
    assert (model.truncated, model.boundary_mismatches) == (1, 0)


def test_an_answer_that_shares_a_token_with_its_context_is_encoded_alone(gpt, tokenizer):
    """The whole text "ca" + "b" is c, ab: nothing is left for "b" (lm-eval pull request 4055)."""
    model = HarnessModel(model=gpt, tokenizer=tokenizer, context_length=LENGTH)
    ((logprob, _),) = model.loglikelihood(asked(("ca", "b")))
    assert logprob == pytest.approx(plain_score(gpt, [3, 1, 2], 2), abs=1e-5)
    assert model.boundary_mismatches == 1


def test_what_cannot_be_scored_is_nan_and_does_not_run(gpt, tokenizer):
    """No tokens, or more than the context; the item's other answers are left out with it."""
    model = HarnessModel(model=gpt, tokenizer=tokenizer, context_length=LENGTH)
    requests = asked(("a", ""), ("c", "b" * 25), ("a", "c"))
    second = ("a" * 30, "d")
    requests.append(Instance("loglikelihood", {}, second, 1, metadata=("t", 1, 1)))
    scores = model.loglikelihood(requests)
    assert [math.isnan(logprob) for logprob, _ in scores] == [True, True, False, True]
    assert model.truncated == 0


def test_greedy_answers_are_marked(gpt, tokenizer):
    """What the plain arg-max writes after "ab", and another letter."""
    with torch.no_grad():
        best = int(gpt(torch.tensor([[6]]))[0, -1].argmax())
    letters = {1: "a", 2: "b", 3: "c", 4: "d"}
    model = HarnessModel(model=gpt, tokenizer=tokenizer, context_length=LENGTH)
    scores = model.loglikelihood(asked(*(("ab", letter) for letter in letters.values())))
    assert [greedy for _, greedy in scores] == [token == best for token in letters]


@pytest.mark.parametrize("stride", [None, 3, 8])
def test_windows_of_a_whole_text_predict_each_token_once(gpt, tokenizer, stride):
    """Disjoint windows of 8, or later ones that predict `stride` tokens after as much as fits."""
    seen: list[Window] = []

    class Spy(HarnessModel):
        def _score_batch(self, batch: Any) -> Any:
            seen.extend(batch)
            return super()._score_batch(batch)

    model = Spy(model=gpt, tokenizer=tokenizer, context_length=8, stride=stride)
    text = "a" * 20
    (total,) = model.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)])
    windows = sorted(seen, key=lambda window: -len(window.targets))
    assert sum(len(window.targets) for window in windows) == 20
    assert windows[0] == Window(0, (0, *[1] * 7), [1] * 8)
    assert all(len(window.targets) == (stride or 8) for window in windows[1:-1])
    assert all(len(window.inputs) == 8 for window in windows)
    by_hand = 0.0
    with torch.no_grad():
        for _, inputs, targets in windows:
            rows = gpt(torch.tensor([inputs]))[0].log_softmax(-1)[-len(targets) :]
            by_hand += sum(float(row[1]) for row in rows)
    assert total == pytest.approx(by_hand, abs=1e-4)


def test_equal_inputs_are_computed_once(gpt, tokenizer):
    shapes = []
    handle = gpt.h[0].register_forward_hook(
        lambda module, inputs, output: shapes.append(tuple(inputs[0].shape[:2]))
    )
    model = HarnessModel(model=gpt, tokenizer=tokenizer, context_length=LENGTH)
    model.loglikelihood(asked(("aca", "c"), ("aca", "d"), ("aa", "c")))
    handle.remove()
    assert shapes == [(2, 3)]


def test_an_answer_ends_at_a_stop_string_or_the_limit(gpt, tokenizer):
    """The plain arg-max of each step, cut by hand."""
    ids = [1, 3]
    with torch.no_grad():
        for _ in range(5):
            ids.append(int(gpt(torch.tensor([ids]))[0, -1].argmax()))
    written = tokenizer.decode(ids[2:])
    model = HarnessModel(model=gpt, tokenizer=tokenizer, context_length=LENGTH)

    def write(until: list[str], tokens: int = 5) -> str:
        settings = {"until": until, "max_gen_toks": tokens, "do_sample": False}
        requests = [Instance("generate_until", {}, ("ac", settings), 0)]
        return model.generate_until(requests)[0]

    end = written.find("<|endoftext|>")
    expected = written if end < 0 else written[:end]
    assert write(["no such text"]) == expected
    if len(expected) > 1:
        assert write([expected[1]]) == expected[: expected.index(expected[1])]
    with pytest.raises(ValueError, match="only greedy"):
        requests = [Instance("generate_until", {}, ("a", {"until": [], "do_sample": True}), 0)]
        model.generate_until(requests)
