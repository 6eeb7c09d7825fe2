"""Zero-shot scores of a made model on the 13 local sets, and its items' values."""

from __future__ import annotations

import json
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from efftrain_cli.data.tokenizer import Tokenizer, load_tokenizer
from efftrain_cli.model.gpt import GPT, GPTConfig
from tests.conftest import SHARED

SETS = SHARED / "data" / "evalpack"
GPT2 = SHARED / "data" / "gpt2_tokenizer"
MERGES = 256
ITEMS = 200
"""First items of each set whose values are recorded."""
QUESTIONS = 40
"""First questions of TriviaQA whose written answers are recorded."""


class Float64GPT(GPT):
    """A GPT in float64, with made weights: arg-maxima that do not depend on the processor."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.double()
        draw = np.random.RandomState(46)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                # Large biases would let one token win everywhere.
                spread = 0.1 if name.endswith("bias") else 1.0
                made = draw.randint(-512, 513, tuple(parameter.shape)) / 512
                parameter.copy_(torch.from_numpy(spread * made))

    def head(self, x: Tensor, *rest: Any) -> Tensor:
        # The evaluator gives fp32.
        return super().head(x.double(), *rest)


def make_tokenizer(folder: Path) -> Tokenizer:
    """Cut GPT-2's vocabulary to its bytes, its first merges and the end of text."""
    vocabulary = json.loads((GPT2 / "encoder.json").read_text("utf-8"))
    kept = {token: id for token, id in vocabulary.items() if id < 256 + MERGES}
    kept["<|endoftext|>"] = len(kept)
    lines = (GPT2 / "vocab.bpe").read_text("utf-8").splitlines()
    (folder / "encoder.json").write_text(json.dumps(kept), "utf-8")
    (folder / "vocab.bpe").write_text("\n".join(lines[: MERGES + 1]) + "\n", "utf-8")
    return load_tokenizer(folder)


def record() -> dict[str, Any]:
    """Return each set's metrics and item values; skip if the sets or the harness are absent."""
    if not SETS.is_dir():
        pytest.skip("the folder of shared test data is not beside the repository")
    pytest.importorskip("lm_eval")
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TQDM_DISABLE"):
        os.environ.setdefault(name, "1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = make_tokenizer(folder)
        size = tokenizer.vocab_size
        config = GPTConfig(
            n_layer=1,
            n_head=2,
            n_embd=16,
            seq_len=128,
            vocab_size=size,
            padded_vocab_size=-(-size // 64) * 64,
        )
        return score_sets(Float64GPT(config).eval(), tokenizer, folder)


def score_sets(model: GPT, tokenizer: Tokenizer, scratch: Path) -> dict[str, Any]:
    from lm_eval import utils
    from lm_eval.api.instance import Instance

    from efftrain_cli.zeroshot.model import HarnessModel
    from efftrain_cli.zeroshot.score import score_task
    from efftrain_cli.zeroshot.tasks import find_specs, load_tasks

    # The harness compiles its templates for each item: a third of the time.
    utils.env.from_string = cache(utils.env.from_string)
    language_model = HarnessModel(
        model=model, tokenizer=tokenizer, context_length=128, batch_tokens=1024
    )
    found: dict[str, Any] = {}
    for spec in find_specs([], SETS):
        (task,) = load_tasks(spec, SETS, scratch)
        score = score_task(task, language_model, None)
        found[spec.name] = {
            "metrics": score.metrics,
            "items": len(score.items),
            "truncated": language_model.truncated,
            "boundary_mismatches": language_model.boundary_mismatches,
            "values": {
                metric: compact([item[metric] for item in score.items[:ITEMS]])
                for metric in score.metrics
            },
        }
    lines = (SETS / "triviaqa_3000.jsonl").read_text("utf-8").splitlines()[:QUESTIONS]
    settings = {"until": ["\n", "."], "max_gen_toks": 12, "do_sample": False}
    questions = [
        Instance("generate_until", {}, (f"Question: {json.loads(line)['question']}", settings), i)
        for i, line in enumerate(lines)
    ]
    found["answers"] = language_model.generate_until(questions)
    return found


def compact(values: list[Any]) -> Any:
    """Write zeros and ones as one string."""
    if all(value in (0, 1) for value in values):
        return "".join(str(int(value)) for value in values)
    return values
