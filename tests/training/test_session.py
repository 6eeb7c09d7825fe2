"""The time that a probe foretells."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from efftrain_cli.foundation.step import Progress
from efftrain_cli.model.flops import flops_per_token
from efftrain_cli.plan.plan import model_config
from efftrain_cli.training import session
from efftrain_cli.training.session import probe_seconds
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
        ranks=session.ALONE,
    )
    state = fresh(recipe)
    state.progress = Progress(tokens=SPENT, flops=2 * per_token)

    def probe(_: object, probed: object, __: object) -> float:
        return 0.5 if probed is state else 0.25

    monkeypatch.setattr(session, "probe", probe)
    assert probe_seconds(here, state, summary) == pytest.approx(seconds)  # type: ignore[arg-type]
