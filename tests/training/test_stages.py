"""The stages of a recipe: their rules, what they make of the plan, and when a stage ends."""

from __future__ import annotations

import itertools

import pytest

from efftrain_cli.foundation.step import Progress
from efftrain_cli.plan.plan import after_evaluation, plan_run, stage_ended
from efftrain_cli.plan.preview import staged_warnings, summarize_plan
from efftrain_cli.recipe.recipe import Recipe, load_recipe
from tests.tiny import tiny_recipe

STAGED = (
    "model={n_layer = 4, n_head = 4, n_embd = 32, seq_len = 16}",
    "optim={lr = 1e-3, warmup_steps = 4, schedule = 'linear', decay_tokens = 6400}",
    "train.tokens=6400",
    "train.batch_size=4",
    "eval.every=1",
    "staged_growth.symmetry=offdiag",
    "stages=[{model={n_layer=2, n_head=2, n_embd=16}, lr=2e-3, switch={rule='tokens', value=1280}},"
    " {operators=['depth'], rewarmup_steps=5, switch={rule='steps', value=40}},"
    " {operators=['width'], rewarmup_steps=10, schedule_ratio=0.5}]",
)


def staged(*overrides: str) -> Recipe:
    return tiny_recipe(*STAGED, *overrides)


def test_every_stage_has_its_model_and_its_learning_rate():
    recipe = staged()
    shapes = [(m.n_layer, m.n_head, m.n_embd, m.seq_len) for m in map(recipe.model_at, range(3))]
    assert shapes == [(2, 2, 16, 16), (4, 2, 16, 16), (4, 4, 32, 16)]
    assert recipe.model_at(2) == recipe.model
    assert [recipe.optim_at(stage).lr for stage in range(3)] == [2e-3, 1e-3, 1e-3]


def test_the_plan_grows_jumps_the_schedule_and_warms_up_again():
    recipe = staged()
    steps = list(plan_run(recipe, vocab_size=64))
    tokens = recipe.train.batch_size * recipe.model.seq_len  # 64 a step
    by_step = {plan.step: (plan, after) for plan, after in steps}
    assert len(steps) == 100
    # 1280 tokens are 20 steps; the second switch is at step 40
    assert [after.stage for _, after in steps] == [0] * 20 + [1] * 20 + [2] * 60
    assert [len(plan.keep) for plan, _ in steps] == [2] * 20 + [4] * 80
    # what was spent is never rewritten
    assert [after.tokens for _, after in steps] == [tokens * step for step in range(1, 101)]
    assert [plan.window_start for plan, _ in steps] == [4 * step for step in range(100)]
    # the schedule: 20 steps by the authors' depth constant are 14, then half of 14 + 20 are 17
    assert by_step[21][1].schedule_step == 15
    assert by_step[21][1].schedule_tokens == round(1280 / 1.412) + tokens
    assert by_step[41][1].schedule_step == 18

    def scheduled(schedule_tokens: int) -> float:
        return 1e-3 * (1 - (schedule_tokens - 4 * tokens) / (6400 - 4 * tokens))

    for step, start, rewarmup in ((21, 20, 5), (25, 20, 5), (30, 20, 5), (49, 40, 10)):
        plan, after = by_step[step]
        factor = min(1.0, (step - start) / rewarmup)
        assert plan.lr == pytest.approx(factor * scheduled(after.schedule_tokens)), step
    assert by_step[10][0].lr == pytest.approx(2 * scheduled(10 * tokens))
    # FLOPs: each stage costs its own model's, so the growing run is cheaper
    flops = [after.flops - before.flops for (_, before), (_, after) in itertools.pairwise(steps)]
    assert flops[10] < flops[30] < flops[60]


def test_slope_rule_reads_the_regression_and_waits_for_its_window():
    """L = t^-0.06 up to t = 40, then t^-0.03: the slope of 5 evaluations passes -0.05 only once
    enough lie beyond."""
    recipe = staged(
        'stages.0.switch={rule="slope", value=-0.05, window=5, times=3}',
        'stages.1.switch={rule="steps", value=90}',
    )
    progress = Progress()
    ends = None
    for step in range(1, 80):
        loss = step**-0.06 if step <= 40 else 40**-0.06 * (step / 40) ** -0.03
        progress = progress._replace(
            step=step, tokens=step * 64, schedule_step=step, schedule_tokens=step * 64
        )
        progress = after_evaluation(recipe, progress, loss)
        if stage_ended(recipe, progress):
            ends = step
            break
    # A regression over 5 points weighs its 4 segments 4:6:6:4. The window ending at 41 has slope
    # -(16 * 0.06 + 4 * 0.03) / 20 = -0.054, that at 42 -0.045: the first of three.
    assert ends == 44
    assert len(progress.stage_curve) == 7  # window + times - 1: no more is kept


def test_evaluations_of_the_warmup_and_rewarmup_do_not_count():
    recipe = staged('stages.1.switch={rule="loss", value=1.0}')
    grown = Progress(step=22, stage=1, stage_step=20, schedule_step=16)
    assert not stage_ended(recipe, after_evaluation(recipe, grown, 0.5))
    assert stage_ended(recipe, after_evaluation(recipe, grown._replace(step=26), 0.5))
    early = staged('stages.0.switch={rule="loss", value=1.0}')
    assert not stage_ended(early, after_evaluation(early, Progress(step=4, schedule_step=4), 0.5))
    assert stage_ended(early, after_evaluation(early, Progress(step=5, schedule_step=5), 0.5))


def warned(recipe: Recipe) -> list[str]:
    return list(staged_warnings(recipe, summarize_plan(recipe).end))


@pytest.mark.parametrize(
    "switch, tokens, stage",
    [('{rule="tokens", value=1280}', 1216, 0), ('{rule="steps", value=200}', 6400, 1)],
)
def test_a_budget_that_ends_before_the_switch_is_said_to_never_grow(switch, tokens, stage):
    """64 tokens a step: 1,216 end one step before stage 0 does, 6,400 after 100 of the 200 steps of
    stage 1."""
    recipe = staged(f"stages.{stage}.switch={switch}", f"train.tokens={tokens}")
    (warning,) = warned(recipe)
    assert f"train.tokens = {tokens:,}, ends in stage {stage}: the model never grows" in warning


def test_a_schedule_that_cannot_reach_min_lr_is_warned_of():
    """20 steps of 64 tokens; 1,280 / 1.412 = 907 and 20 more; half of 2,187 is 1,094 and 60 more:
    4,934."""
    recipe = staged()
    (warning,) = warned(recipe)
    assert "stands at 4,934 tokens" in warning and "set optim.decay_tokens = 4_934" in warning
    for meant in (
        "optim.decay_tokens=4934",
        "optim.schedule=constant",
        "optim={decay_tokens = false, decay_steps = 90}",
        'stages.0.switch={rule = "loss", value = 3}',
        'stages.0.switch={rule = "flops", value = 1e9}',
    ):
        assert warned(staged(meant)) == [], meant
    assert not list(staged_warnings(recipe, summarize_plan(recipe, until=5).end))


def test_the_small_staged_recipe_spends_what_small_spends():
    """Equal FLOPs, and both at min_lr at their end: a comparison of nothing but the growth."""
    ends = {}
    for recipe in (load_recipe("small"), load_recipe("small-staged-depth")):
        *_, (plan, after) = plan_run(recipe, vocab_size=1024)
        ends[bool(recipe.stages)] = (plan.lr, after.flops)
        assert recipe.model == load_recipe("small").model
        assert plan.lr == pytest.approx(recipe.optim.min_lr, rel=1e-3)
    assert ends[True][1] == pytest.approx(ends[False][1], rel=1e-3)
