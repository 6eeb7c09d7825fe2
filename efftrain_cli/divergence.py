"""The end of a run whose loss or gradient was not finite: what is kept, and what is found out about the step."""

from __future__ import annotations

from typing import NoReturn

import torch

from efftrain_cli.build import build_forward_backward
from efftrain_cli.checkpoints import save
from efftrain_cli.errors import DivergedError, EfftrainError
from efftrain_cli.run import Run
from efftrain_cli.session import Setting
from efftrain_cli.state import TrainState
from efftrain_cli.step import Progress, StepPlan
from efftrain_cli.trainer import StepRecord, finite_or_none


def raise_diverged(run: Run, state: TrainState, setting: Setting, record: StepRecord, before: Progress) -> NoReturn:
    """Records the first step that was not finite, saves the state before it, and ends the run.

    The update of that step and of all later ones was not applied, so weights and moments are still those of `before`.
    The step's gradient is computed again for the report: nothing was measured for it during training.

    Raises:
        DivergedError: always.
    """
    assert record.plan is not None
    plan = record.plan
    state.progress = before
    state.nonfinite.zero_()
    loss, norms = gradient_norms_by_layer(state, setting, plan)
    bad = [layer for layer, norm in norms.items() if finite_or_none(norm) is None]
    windows = -(-plan.batch_size // plan.pieces)
    run.event(
        "diverged",
        {
            "step": plan.step,
            "loss": finite_or_none(loss),
            "lr": plan.lr,
            "seq_len": plan.seq_len,
            "batch_size": plan.batch_size,
            "window_start": plan.window_start,
            "window_tokens": setting.train_data.starts(plan.window_start, windows).tolist(),
            "grad_norm_by_layer": {layer: finite_or_none(norm) for layer, norm in norms.items()},
            "nonfinite_layers": bad,
        },
    )
    try:
        save(run, state, setting.recipe)
    except EfftrainError as error:
        run.event("save_failed", {"step": before.step, "reason": str(error)})
    if bad:
        where = f"gradients of {', '.join(bad[:4])}{' and others' if len(bad) > 4 else ''}"
    elif finite_or_none(loss) is None:
        where = "the loss"
    else:
        where = "computed once more, the same step is finite: memory or hardware may be faulty"
    raise DivergedError(
        f"step {plan.step}: the loss or a gradient is not finite ({where}; lr {plan.lr:.3g}, seq_len {plan.seq_len}). "
        f"The update was not applied; weights are those after step {before.step}, and saved. events.jsonl has the step's "
        "windows and the gradient norm of every layer. Lower optim.lr, lengthen optim.warmup_steps, or add a "
        f"sequence length warmup; `efftrain pretrain --resume {run.name} --set optim.lr=... --override-resume` goes on "
        "from here"
    )


def gradient_norms_by_layer(state: TrainState, setting: Setting, plan: StepPlan) -> tuple[float, dict[str, float]]:
    """Loss and l2 norm of the gradient of each block and of each table outside, of one planned step. Changes nothing."""
    forward_backward = build_forward_backward(setting.recipe, state.model, setting.device)
    state.optimizer.zero_grad(set_to_none=True)
    gradient = forward_backward(setting.train_data.batch(plan).to(setting.device), plan)
    layers: dict[str, list[torch.Tensor]] = {}
    for name, parameter in state.model.named_parameters():
        layer = ".".join(name.split(".")[:2]) if name.startswith("h.") else name.split(".")[0]
        if parameter.grad is not None:
            layers.setdefault(layer, []).append(parameter.grad)
    norms = {layer: float(torch.nn.utils.get_total_norm(grads)) for layer, grads in layers.items()}
    state.optimizer.zero_grad(set_to_none=True)
    return float(gradient.loss), norms
