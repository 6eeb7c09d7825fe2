"""benchmarks/accumulation.py: it measures sums that training makes, and predicts those that it
does not."""

from __future__ import annotations

import pandas as pd

from benchmarks import accumulation
from benchmarks.accumulation import needs_of
from efftrain_cli.methods.variance_retention import needed_bits
from tests.conftest import cli
from tests.trained_run import make_run


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
