"""The time that a probe foretells."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from efftrain_cli.foundation.step import Progress
from efftrain_cli.model.flops import flops_per_token
from efftrain_cli.plan.plan import model_config
from efftrain_cli.training import origin, session
from efftrain_cli.training.session import bf16_speedup, probe_seconds
from tests.tiny import CPU, VOCAB_SIZE, fresh, tiny_recipe

STAGES = "stages=[{model={n_layer=1}, switch={rule='steps', value=2}}, {operators=['depth']}]"
SPENT = 64


@pytest.mark.parametrize("overrides, seconds", [([], 576 * 0.5), ([STAGES], 10 * 0.25)])
def test_the_seconds_of_the_rest_of_a_plan(monkeypatch, overrides, seconds):
    """Half a second a token. Of a staged recipe, what is left are the FLOPs of ten tokens of the
    last stage, each of which takes a quarter of a second."""
    recipe = tiny_recipe(*overrides)
    per_token = flops_per_token(model_config(recipe, VOCAB_SIZE), 16, 2).with_logits
    summary = SimpleNamespace(tokens=640, flops=12 * per_token)
    here = SimpleNamespace(
        recipe=recipe,
        corpus=SimpleNamespace(vocab_size=VOCAB_SIZE),
        device=CPU,
    )
    state = fresh(recipe)
    state.progress = Progress(tokens=SPENT, flops=2 * per_token)

    def probe(_: object, probed: object, __: object) -> float:
        return 0.5 if probed is state else 0.25

    monkeypatch.setattr(session, "probe", probe)
    assert probe_seconds(here, state, summary) == pytest.approx(seconds)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "overrides, has_units, speedup",
    [
        ([], True, 2.0),
        ([], False, None),
        (["model.n_embd=192"], True, None),
        (["train.dtype=bf16"], True, None),
    ],
)
def test_what_bf16_would_gain_on_a_cpu(monkeypatch, overrides, has_units, speedup):
    """640 seconds for 640 tokens in fp32, half a second a token in bf16."""
    recipe = tiny_recipe("model.n_embd=256", "train.dtype=fp32", *overrides)
    monkeypatch.setattr(session, "has_bf16", lambda device: has_units)
    monkeypatch.setattr(session, "probe", lambda here, probed, plan: 0.5)
    here = SimpleNamespace(recipe=recipe, device=CPU)
    plan = SimpleNamespace(tokens=640)
    assert bf16_speedup(here, fresh(recipe), plan, 640.0) == speedup  # type: ignore[arg-type]


def test_the_origin_has_the_bytes_of_the_scored_targets(tmp_path, monkeypatch):
    """One window of 8 targets "ab" at the beginning of the validation text, whose rest is single
    letters: 2 bytes a target, where all of it has (40 + 40) / (20 + 40 + 1) a token."""
    monkeypatch.setenv("EFFTRAIN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "train.txt").write_text("ab" * 500)
    (tmp_path / "valid.txt").write_text("ab" * 20 + "x" * 40)
    recipe = tiny_recipe(
        f"data.train={tmp_path}/train.txt",
        f"data.valid={tmp_path}/valid.txt",
        "data.tokenizer=bpe:258",
        "model.seq_len=8",
        "eval.windows=1",
    )
    found = origin.origin_of(session.prepare_session(recipe, CPU), "tiny")
    assert found["data"]["valid_bytes_per_token"] == 2.0  # type: ignore[index]
