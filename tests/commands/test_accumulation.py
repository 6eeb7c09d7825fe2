"""benchmarks/accumulation.py: it measures the sums that training makes, and predicts those that it
does not."""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch
from torch import Tensor

from benchmarks import accumulation
from benchmarks.accumulation import Measure, needs_of
from efftrain_cli.methods.variance_retention import needed_bits
from tests.conftest import cli
from tests.tiny import config_of, drawn
from tests.trained_run import make_run, random_gpt


def test_the_products_are_those_of_training(monkeypatch):
    """What is taken from a layer gives back the gradient of its weight."""
    kept = {}

    def keep(self: Measure, name: str, *operands: Tensor) -> list[Any]:
        kept[name] = [tensor.clone() for tensor in operands]
        return []

    monkeypatch.setattr(Measure, "layer", keep)
    model = random_gpt(config_of(tied=False), 0.3, seed=0)
    ids = drawn(61, 3, 9, seed=0)
    accumulation.measure_model(model, ids[:, :-1], ids[:, 1:], Measure("fp32"))
    (model.loss_sum(ids[:, :-1], ids[:, 1:]) / 24).backward()
    assert len(kept) == 9
    layers = {**dict(model.named_modules()), "head": model.lm_head}
    for name, (x, weight, grad) in kept.items():
        layer = layers[name]
        torch.testing.assert_close(grad.t() @ x, layer.weight.grad, rtol=1e-4, atol=1e-6)
        assert torch.equal(weight, layer.weight)


def test_needs_of_sums_by_hand():
    """Of 100 products: 5 bits suffice whole, 4 in chunks of 64."""
    errors = {(4, 0): 0.2, (4, 64): 0.04, (5, 0): 0.01, (5, 64): 0.02}
    known = {"layer": "a", "role": "forward", "n": 100, "product_bits": 5}
    rows = []
    for (bits, chunk), error in errors.items():
        measured = {"bits": bits, "chunk": chunk, "relative_error": error, "vrr_bits": chunk + 4}
        rows.append({**known, **measured})
    sums = pd.DataFrame(rows)
    (need,) = needs_of(sums, 0.04).itertuples()
    assert (need.bits, need.bits_chunked) == (5, 4)
    assert (need.vrr, need.vrr_chunked) == (4, 68)
    assert needs_of(sums, 0.001).bits.item() == 13


def test_the_script_measures_a_run(tmp_path, monkeypatch, capsys):
    path = make_run(tmp_path, overrides=("train.micro_batch_tokens=128", "data.repeat=true"))
    words = ["rand", "--operands", "bf16", "--error", "0.01"]
    monkeypatch.setattr(accumulation, "SAMPLES", 32)
    monkeypatch.setattr("sys.argv", ["accumulation.py", *words])
    accumulation.main()
    assert "bf16 operands" in capsys.readouterr().out
    assert (path / "accumulation" / "step-00000010.csv").is_file()


def test_the_plan_of_a_recipe_predicts_the_bits_of_its_sums():
    """fp8_e5m2 products have 2 + 2 + 1 bits; a micro-batch has 4,096 tokens."""
    shown = cli("pretrain --recipe small-accumulation-9bit-c64 --plan").output
    sums = [line for line in shown.splitlines() if line.startswith("sums ")]
    assert [line.split()[1] for line in sums] == ["forward:", "grad_input:", "grad_weight:"]
    (weights,) = [line for line in sums if "grad_weight" in line]
    words = weights.replace(",", "").split()
    length = int(words[words.index("products;") - 1])
    assert length == 4096
    assert f"by theory {needed_bits(5, 4096)} bits, in chunks of 64" in weights
    assert "sums " not in cli("pretrain --recipe small --plan").output
