"""What is found out and checked before step 1: probes, ranks, the origin."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.foundation.step import Batch, Progress, StepPlan
from efftrain_cli.model.flops import flops_per_token
from efftrain_cli.plan.plan import model_config
from efftrain_cli.plan.preview import summarize_plan
from efftrain_cli.training import dist, origin, session
from efftrain_cli.training.session import bf16_speedup, probe_seconds
from tests.tiny import CPU, METHODS, VOCAB_SIZE, fresh, tiny_recipe

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


@pytest.mark.parametrize(
    "overrides, ranks, share, plan",
    [([], 3, (2, 16), (6, 3)), (METHODS["simigrad"], 1, (4, 16), (4, 2))],
    ids=["three ranks", "halves"],
)
def test_a_probe_times_its_second_pass(monkeypatch, overrides, ranks, share, plan):
    """Two sequences of 16 tokens on each rank; of SimiGrad also in each half, as it holds the
    gradient of one while it computes the other's."""
    recipe = tiny_recipe(*overrides)
    passes = []
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)

    def gradient(_: object, __: object) -> object:
        def compute(batch: Batch, plan: StepPlan) -> None:
            clock.now += 9.6 if passes else 60.0
            passes.append((batch.tokens.shape, (plan.batch_size, plan.accumulation_steps)))

        return compute

    monkeypatch.setattr(session, "time", clock)
    monkeypatch.setattr(session, "Gradient", gradient)
    state = fresh(recipe)
    monkeypatch.setattr(dist, "world_size", lambda: ranks)
    here: Any = SimpleNamespace(recipe=recipe, device=CPU)
    seconds = session.probe(here, state, summarize_plan(recipe))
    assert passes == [(share, plan)] * 2
    assert seconds == pytest.approx(9.6 / (16 * plan[0]))


SHARD = "parallel.strategy=shard"


@pytest.mark.parametrize(
    "method, more, ranks",
    [
        # Four micro-batches of 2 sequences on 1 or 2 ranks, six on 3.
        ("layer dropping", [], 3),
        # Ranks that divide the model run the same blocks.
        ("layer dropping", [SHARD], 2),
        # 12 sequences are 6 micro-batches, and 8 of which each rank has 4, 2 of each half.
        ("simigrad", [SHARD], 2),
        ("", ["layer dropping"], 1),
        ("", ["layer dropping"], 2),
        ("", ["simigrad"], 2),
        ("", ["muon"], 3),
    ],
)
def test_a_cut_that_matters_and_is_another_is_warned_of(monkeypatch, method, more, ranks):
    overrides = [word for name in more for word in METHODS.get(name, [name])]
    recipe = tiny_recipe(*METHODS.get(method, []), *overrides)
    monkeypatch.setattr(dist, "world_size", lambda: ranks)
    warning = session.cut_warning(recipe, summarize_plan(recipe))
    name = {"layer dropping": "progressive_layer_drop"}.get(method, method)
    assert warning.startswith(f"[{name}] depends on how") == bool(method) == bool(warning)


@pytest.mark.parametrize("method, fewest", [("none", 8), ("simigrad", 4)])
def test_as_many_ranks_as_the_smallest_step_has_sequences(monkeypatch, method, fewest):
    """F90."""
    recipe = tiny_recipe(*METHODS[method])
    summary = summarize_plan(recipe)
    monkeypatch.setattr(dist, "world_size", lambda: fewest)
    session.check_ranks(recipe, summary)
    monkeypatch.setattr(dist, "world_size", lambda: fewest + 1)
    with pytest.raises(UsageError) as raised:
        session.check_ranks(recipe, summary)
    assert str(raised.value) == (
        f"a step of {fewest} sequences cannot be shared by {fewest + 1} devices\n"
        f"use at most --devices {fewest}, or raise train.batch_size"
    )


def test_the_origin_has_the_bytes_of_the_scored_targets(tmp_path, monkeypatch, capsys):
    """One window of 8 targets "ab" at the beginning of the validation text, whose rest is single
    letters: 2 bytes a target, where all of it has (40 + 40) / (20 + 40 + 1) a token. From
    501 training tokens on, as many as there are, verification is announced here."""
    monkeypatch.setattr(session, "SLOW_TO_VERIFY", 501)
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
    assert "verifying 501 tokens" in capsys.readouterr().out
