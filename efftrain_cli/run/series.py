"""The names under which a run's columns are drawn by wandb and TensorBoard, in groups; metrics.jsonl stays flat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from efftrain_cli.recipe.check import methods_in
from efftrain_cli.recipe.recipe import Recipe

AXES = {
    "step": "axis/step",
    "tokens": "axis/tokens",
    "total_flops": "axis/flops",
    "train_seconds": "axis/train_seconds",
}
"""What a curve can be drawn over."""

GROUPS = {
    "train": "loss tokens_discarded windows sequences seq_len batch_size accumulation_steps stage segment",
    "val": "val_loss",
    "optim": "lr grad_norm",
    "throughput": "tokens_per_second mfu flops flops_without_logits optimizer_flops seconds eval_seconds checkpoint_seconds compile_seconds "
    "comm_seconds wait_seconds wall_seconds other_seconds",
    "stability": "loss_ratio adam_sqrt_v_l1 adam_sqrt_v_max nonfinite",
}
METHODS = {method.prefix or name: name for name, method in methods_in(Recipe).items()}
"""Prefix of a method's columns -> its section."""
NAMES = {
    **{
        name: f"{name}/loss" for name in METHODS.values()
    },  # a method's own term of what is minimized
    "val_loss": "val/loss",
    "seconds": "throughput/step_seconds",
    "flops": "throughput/step_flops",
}
LOWEST = ("train/loss", "val/loss")
"""Series whose best value is the least one."""
HIGHEST = ("stability/loss_ratio", "stability/adam_sqrt_v_max")
"""Series whose extreme says most."""

_SERIES = (
    {column: f"{group}/{column}" for group, columns in GROUPS.items() for column in columns.split()}
    | AXES
    | NAMES
)


def series_of(column: str) -> str:
    """The grouped name of a column: "loss" is "train/loss", "pld_theta" is "theta" of the method with this prefix."""
    if column in _SERIES:
        return _SERIES[column]
    prefix, _, name = column.partition("_")
    return f"{METHODS[prefix]}/{name}" if name and prefix in METHODS else f"other/{column}"


def grouped(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of metrics.jsonl under grouped names, without what is null and what only the file needs."""
    return {
        series_of(column): value
        for column, value in row.items()
        if value is not None and column != "check"
    }
