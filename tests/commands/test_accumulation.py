"""benchmarks/accumulation.py: it measures the sums that training makes, and predicts those that it
does not."""

from __future__ import annotations

import csv
import itertools

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from benchmarks import accumulation
from benchmarks.accumulation import (
    BITS,
    CHUNKS,
    Analysis,
    analyse,
    lines,
    needs_of,
    save,
    sums_in_order,
)
from efftrain_cli.methods.variance_retention import longest_sums, needed_bits
from tests.conftest import cli
from tests.model.rounding import sum_in_order
from tests.tiny import config_of, drawn
from tests.trained_run import make_run, random_gpt


class Recorder:
    """Keeps what the backward pass hands over, in the place of what measures it."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[Tensor, Tensor, Tensor]] = {}

    def layer(self, name: str, x: Tensor, weight: Tensor, grad: Tensor) -> list[dict]:
        self.seen[name] = x.clone(), weight.clone(), grad.clone()
        return []


def test_the_products_are_those_of_training():
    """What is taken from each layer gives back the gradient of its weight, as training computes
    it."""
    config = config_of(seq_len=8, vocab_size=60)
    model = random_gpt(config, 0.3, seed=0)
    tokens = drawn(60, 3, 9, seed=0)
    recorder = Recorder()
    accumulation._measure_model(model, tokens[:, :-1], tokens[:, 1:], recorder)  # type: ignore[arg-type]
    (model.loss_sum(tokens[:, :-1], tokens[:, 1:]) / 24).backward()
    names = [
        f"h.{block}.{name}"
        for block in (0, 1)
        for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]
    assert recorder.seen.keys() == {*names, "head"}
    for name in names:
        x, weight, grad = recorder.seen[name]
        layer = model.get_submodule(name)
        torch.testing.assert_close(grad.t() @ x, layer.weight.grad, rtol=1e-4, atol=1e-6)
        assert torch.equal(weight, layer.weight)
    x, weight, grad = recorder.seen["head"]
    assert (x.shape, weight.shape, grad.shape) == ((24, 16), (64, 16), (24, 64))
    torch.testing.assert_close(grad.sum(dim=1), torch.zeros(24), atol=1e-7, rtol=0)


def test_fp32_carries_these_sums_as_well_as_fp64():
    generator = torch.Generator().manual_seed(0)
    terms = torch.randn(1024, 200, generator=generator).bfloat16().float()
    exact = terms.double().sum(dim=0).numpy()
    for bits, chunk in ((4, 0), (12, 0), (8, 64)):
        errors = [
            np.linalg.norm(sums - exact) / np.linalg.norm(exact)
            for sums in (
                sums_in_order(terms, [bits], chunk)[0].numpy(),
                sum_in_order(terms.numpy(), bits, chunk),
            )
        ]
        assert errors[0] == pytest.approx(errors[1], rel=0.01)


@pytest.fixture(scope="module")
def analysis(tmp_path_factory: pytest.TempPathFactory) -> accumulation.Analysis:
    folder = tmp_path_factory.mktemp("accumulation")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EFFTRAIN_RUNS", str(folder / "runs"))
        make_run(folder, overrides=("train.micro_batch_tokens=512", "data.repeat=true"))
        return analyse("random", samples=128, device="cpu")


def test_every_layer_and_role_is_there_with_its_length(analysis):
    products = analysis.sums.groupby(["layer", "role"], sort=False).n.unique()
    lengths = {key: int(n[0]) for key, n in products.items() if len(n) == 1}
    assert len(lengths) == len(products) == 3 * (2 * 4 + 1)
    assert lengths["h.0.attn.c_attn", "forward"] == 32
    assert lengths["h.0.attn.c_attn", "grad_input"] == 96
    assert lengths["h.1.mlp.c_proj", "forward"] == 128
    assert lengths["h.1.mlp.c_proj", "grad_weight"] == analysis.tokens == 512
    assert lengths["head", "grad_weight"] == 512
    assert list(analysis.sums.role.unique()) == ["forward", "grad_input", "grad_weight"]


def test_errors_behave_as_they_must(analysis):
    for (_, role), sums in analysis.sums.groupby(["layer", "role"]):
        relative = sums.set_index(["bits", "chunk"]).relative_error
        assert set(relative.index) == {(bits, chunk) for bits in BITS for chunk in CHUNKS}
        for chunk in CHUNKS:
            assert relative[12, chunk] < relative[8, chunk] < relative[4, chunk]
            if chunk >= sums.n.iloc[0]:
                assert relative[8, chunk] == relative[8, 0]
        (need,) = needs_of(sums, 0.04).itertuples()
        assert relative[need.cheapest_bits, need.cheapest_chunk] <= 0.04
        assert (relative[relative.index.get_level_values("bits") < need.cheapest_bits] > 0.04).all()
        assert np.isnan(needs_of(sums, 1e-9).cheapest_bits.item())
        if role == "grad_weight":
            assert relative[5, 64] < relative[5, 0]
    longest = analysis.sums[analysis.sums.role == "grad_weight"]
    # swamped: the sums come out too small
    assert longest[(longest.bits == 4) & (longest.chunk == 0)].signed_error.min() < -0.02


def test_needs_of_sums_by_hand():
    """Of 100 products: 5 bits suffice whole and in chunks of 64, 4 only in chunks of 16 and 64."""
    errors = {(4, 0): 0.2, (4, 16): 0.03, (4, 64): 0.04, (5, 0): 0.01, (5, 64): 0.02}
    known = {"layer": "a", "role": "forward", "n": 100, "product_bits": 5, "outlier_share": 0.0}
    sums = pd.DataFrame(
        {
            **known,
            "mean_over_sd": 0.16,
            "bits": b,
            "chunk": c,
            "relative_error": e,
            "vrr_bits": b + c,
        }
        for (b, c), e in errors.items()
    )
    (need,) = needs_of(sums, 0.04).itertuples()
    assert need.has_mean  # 1.5 / sqrt(100) = 0.15
    assert (need.bits, need.bits_chunked) == (5, 4)
    assert (need.vrr, need.vrr_chunked) == (4, 68)
    assert (need.cheapest_bits, need.cheapest_chunk) == (4, 64)
    assert needs_of(sums, 0.001).bits.item() == 13


def test_what_is_said_of_three_products_by_hand():
    """At 4 bits every sum is 5 % off, 2 % too small; one product's mean is 0.5 of its spread,
    beyond 0.15."""
    rows = []
    for role, mean_over_sd in (("forward", 0.5), ("grad_input", 0.1), ("grad_weight", 0.1)):
        for bits, chunk in itertools.product(BITS, CHUNKS):
            errors = (0.05, -0.02) if bits == 4 else (0.03, 0.0)
            outliers = 0.003 if role == "forward" else 0.001
            rows.append(("a", role, 100, 5, mean_over_sd, outliers, bits, chunk, *errors, 4))
    columns = (
        "layer role n product_bits mean_over_sd outlier_share bits chunk relative_error"
        " signed_error vrr_bits"
    )
    analysis = Analysis(
        run="r",
        step=7,
        tokens=2048,
        operands="bf16",
        gradient_operands="fp8_e5m2",
        samples=32,
        sums=pd.DataFrame(rows, columns=columns.split()),
    )
    text = "\n".join(lines(analysis, 0.04))
    assert "r, checkpoint of step 7, a micro-batch of 2,048 tokens; bf16 operands, fp8_e5m2" in text
    assert (
        "forward: every layer is under the error with 5 bits whole and 5 in chunks of 64 (VRR: 4"
        " and 4)" in text
    )
    assert text.count("at 4 bits, whole, sums come out -2.0% of their size at worst") == 3
    assert "1 of 3 products break VRR's assumptions; in 1 of these the measurement" in text
    assert text.count("0.500*") == 1 and text.count("0.30% o ") == 1
    assert "0.10% o" not in text


def test_table_csv_and_plot_say_the_same(analysis, tmp_path):
    shown = list(lines(analysis, 0.04))
    rows = [line for line in shown if line.startswith(("h.", "head"))]
    assert len(rows) == len(analysis.sums) / len(BITS) / len(CHUNKS)
    assert max(map(len, shown)) < 170
    table, figure = save(analysis, tmp_path / "out", 0.04)
    written = list(csv.DictReader(table.read_text().splitlines()))
    assert ",".join(written[0]) == (
        "layer,role,n,product_bits,scale_a,scale_b,mean_over_sd,outlier_share,nonzero_share,"
        "bits,chunk,relative_error,signed_error,vrr_bits"
    )
    assert [float(row["relative_error"]) for row in written] == list(analysis.sums.relative_error)
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_the_script_measures_a_run(tmp_path, monkeypatch, capsys):
    path = make_run(tmp_path, overrides=("train.micro_batch_tokens=128", "data.repeat=true"))
    words = ["rand", "--samples", "32", "--operands", "bf16", "--error", "0.01"]
    monkeypatch.setattr("sys.argv", ["accumulation.py", *words])
    accumulation.main()
    assert "bf16 operands" in capsys.readouterr().out
    assert sorted(file.name for file in (path / "accumulation" / "step-00000010").iterdir()) == [
        "accumulation.csv",
        "accumulation.png",
    ]


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


def test_the_longest_sums_of_a_width():
    """Four times the width forward; 3 x 768 of q, k and v are fewer."""
    lengths = longest_sums(config_of(n_embd=768, n_head=12), 65536)
    assert lengths == {"forward": 3072, "grad_input": 3072, "grad_weight": 65536}
