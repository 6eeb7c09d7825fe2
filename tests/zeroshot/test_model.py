"""Requests of the harness against the plain computation: one at a time, every logit."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance

from efftrain_cli.data.tokenizer import Tokenizer, load_tokenizer
from efftrain_cli.model.gpt import GPT
from efftrain_cli.zeroshot.model import HarnessModel
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
    inputs = torch.tensor([ids[-LENGTH - 1 : -1]])
    targets = torch.tensor(ids[first:])
    with torch.no_grad():
        logprobs = gpt(inputs)[0, -len(targets) :].log_softmax(-1)
    return float(logprobs.gather(1, targets[:, None]).sum())


@pytest.fixture
def model(gpt: GPT, tokenizer: Tokenizer) -> HarnessModel:
    return HarnessModel(model=gpt, tokenizer=tokenizer, context_length=LENGTH, batch_tokens=20)


def asked(*pairs: tuple[str, str]) -> list[Instance]:
    """Requests of one item each."""
    return [
        Instance("loglikelihood", doc={}, arguments=pair, idx=0, metadata=("t", number, 1))
        for number, pair in enumerate(pairs)
    ]


def test_contexts_and_continuations_are_split_as_the_harness_splits(gpt, model):
    """Ids by hand: spaces at the border go with what follows; an empty context is end-of-text."""
    cases = [
        (("ac", "ab"), [1, 3, 6], 2),
        (("ac ", "ab"), [1, 3, 5, 6], 2),
        (("", "cd"), [0, 7], 1),
        (("b" * 30, "ca"), [2] * 30 + [3, 1], 30),
        (("c", "a" * 24), [3] + [1] * 24, 1),
    ]
    scores = model.loglikelihood(asked(*(pair for pair, _, _ in cases)))
    for (_, ids, first), (logprob, _) in zip(cases, scores, strict=True):
        assert logprob == pytest.approx(plain_score(gpt, ids, first), abs=1e-5)
    # 32 - 1 inputs are more than 24; 25 - 1 are not.
    assert (model.truncated, model.boundary_mismatches) == (1, 0)


def test_an_answer_that_shares_a_token_with_its_context_is_encoded_alone(gpt, model):
    """The whole text "ca" + "b" is c, ab: nothing is left for "b" (lm-eval pull request 4055)."""
    ((logprob, _),) = model.loglikelihood(asked(("ca", "b")))
    assert logprob == pytest.approx(plain_score(gpt, [3, 1, 2], 2), abs=1e-5)
    assert model.boundary_mismatches == 1


def test_what_cannot_be_scored_is_nan_and_does_not_run(model):
    """No tokens, or more than the context; the item's other answers are left out with it."""
    requests = asked(("a", ""), ("c", "b" * 25), ("a", "c"))
    second = ("a" * 30, "d")
    requests.append(Instance("loglikelihood", {}, second, 1, metadata=("t", 1, 1)))
    scores = model.loglikelihood(requests)
    assert [math.isnan(logprob) for logprob, _ in scores] == [True, True, False, True]
    assert model.truncated == 0


def test_greedy_answers_are_marked(gpt, model):
    """What the plain arg-max writes after "ab", and another letter."""
    with torch.no_grad():
        best = int(gpt(torch.tensor([[6]]))[0, -1].argmax())
    letters = {1: "a", 2: "b", 3: "c", 4: "d"}
    scores = model.loglikelihood(asked(*(("ab", letter) for letter in letters.values())))
    assert [greedy for _, greedy in scores] == [token == best for token in letters]


@pytest.mark.parametrize(
    "stride, ends", [(None, (8, 16, 20)), (8, (8, 16, 20)), (3, (8, 11, 14, 17, 20))]
)
def test_windows_of_a_whole_text_predict_each_token_once(gpt, tokenizer, stride, ends):
    """Disjoint windows of 8, or later ones that predict `stride` tokens after as much as fits."""
    model = HarnessModel(
        model=gpt, tokenizer=tokenizer, context_length=8, stride=stride, batch_tokens=20
    )
    request = Instance("loglikelihood_rolling", {}, ("a" * 20,), 0)
    stream = [0] + [1] * 20
    expected = 0.0
    for start, end in pairwise((0, *ends)):
        window = torch.tensor([stream[end - 8 : end]])
        with torch.no_grad():
            of_a = gpt(window)[0].log_softmax(-1)[start - end :, 1]
        expected += float(of_a.sum())
    assert model.loglikelihood_rolling([request]) == [pytest.approx(expected, abs=1e-4)]


def test_equal_inputs_are_computed_once_and_the_longest_first(gpt, model):
    """Three windows of up to three inputs fill nine tokens; the fourth is a batch of its own."""
    model.batch_tokens = 9
    shapes = []
    handle = gpt.h[0].register_forward_hook(
        lambda module, inputs, output: shapes.append(tuple(inputs[0].shape[:2]))
    )
    model.loglikelihood(asked(("ab", "c"), ("aca", "c"), ("aca", "d"), ("aa", "c")))
    handle.remove()
    assert shapes == [(2, 3), (1, 1)]


def test_an_answer_ends_at_a_stop_string_or_the_limit(gpt, model, tokenizer):
    """The plain arg-max of each step, cut by hand. Half of the context is the question's."""

    def plain(prompt: list[int], steps: int) -> str:
        ids = list(prompt)
        for _ in range(steps):
            with torch.no_grad():
                ids.append(int(gpt(torch.tensor([ids]))[0, -1].argmax()))
        return tokenizer.decode(ids[len(prompt) :]).partition("<|endoftext|>")[0]

    def write(*prompts: str, **settings: Any) -> list[str]:
        requests = [Instance("generate_until", {}, (prompt, settings), 0) for prompt in prompts]
        return model.generate_until(requests)

    written = plain([1, 3], 5)
    assert len(written) > 1
    other = plain([3], 5)
    assert write("ac", "c", until=["no such text"], max_gen_toks=5) == [written, other]
    assert write("ac", until=[written[1]], max_gen_toks=5) == [written[: written.index(written[1])]]
    assert model.truncated == 0
    long = write("d" + "ac" * 6, "ac" * 6, until=["no such text"], max_gen_toks=80)
    assert long == 2 * [plain([1, 3] * 6, 12)]
    assert model.truncated == 1
    with pytest.raises(ValueError, match="only greedy"):
        write("ac", until=[], do_sample=True)
