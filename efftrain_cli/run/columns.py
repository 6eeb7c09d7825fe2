"""The columns of metrics.jsonl, each declared once: what wandb, TensorBoard and `compare` make of
it.

A method's other columns need no entry: they begin with the section's name, or its `prefix`, which
is their group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Column:
    """One column, or a family of them."""

    name: str
    """Name in a row; of a family, what its columns begin with."""
    group: str
    """Group in wandb and TensorBoard."""
    title: str = ""
    """Title of its figure in `compare`; "" if it has none."""
    unit: str = ""
    """What the figure's y is, with its unit."""
    is_extreme: bool = False
    """Whether a figure with fewer points than steps shows the largest value of each stretch."""
    drawn_as: str = ""
    """Name in its group; "" for its own."""
    is_family: bool = False
    """Whether there is a column each per site, block or position: `grad_norm_h.0`."""
    summary: Literal["", "min", "max"] = ""
    """What wandb's summary holds; "": the last value."""

    @property
    def series(self) -> str:
        """Name in wandb and TensorBoard."""
        return f"{self.group}/{self.drawn_as or self.name}"


_PLAIN = {
    "axis": "step tokens train_seconds",
    "train": "stage segment tokens_discarded windows sequences accumulation_steps z_loss",
    "stability": "adam_sqrt_v_l1 nonfinite",
    "throughput": (
        "tokens_per_second mfu flops_without_logits optimizer_flops cpu_seconds eval_seconds"
        " checkpoint_seconds compile_seconds comm_seconds wait_seconds wall_seconds other_seconds"
    ),
}
"""Group -> its columns without a figure, under their own names."""
COLUMNS = (
    *(Column(name, group) for group, names in _PLAIN.items() for name in names.split()),
    Column("total_flops", "axis", drawn_as="flops"),
    Column("flops", "throughput", drawn_as="step_flops"),
    Column("seconds", "throughput", drawn_as="step_seconds"),
    Column("val_loss", "val", drawn_as="loss", summary="min"),
    Column("val_loss_from_", "val", drawn_as="loss_from_", is_family=True),
    Column("seq_len", "train", "Sequence length", "sequence length (tokens)"),
    Column("batch_size", "train", "Batch size", "batch size (sequences)"),
    Column("lr", "optim", "Learning rate", "learning rate"),
    Column("loss", "train", "Training loss", "training loss (nats/token)", summary="min"),
    Column(
        "grad_norm",
        "optim",
        title="Gradient norm before clipping",
        unit="gradient norm",
        is_extreme=True,
    ),
    Column(
        "loss_ratio",
        "stability",
        title="Loss ratio",
        unit="loss / lowest loss so far",
        is_extreme=True,
        summary="max",
    ),
    Column(
        "adam_sqrt_v_max",
        "stability",
        title="Largest Adam sqrt(v)",
        unit="max sqrt(v)",
        is_extreme=True,
        summary="max",
    ),
    Column(
        "standardization_loss",
        "standardization_loss",
        title="Divergence of activations from N(0, 1), mean over sites",
        unit="nats per channel",
        drawn_as="loss",
    ),
    Column(
        "std_kl_",
        "standardization_loss",
        title="Divergence from N(0, 1) by site",
        unit="nats per channel",
        drawn_as="kl_",
        is_family=True,
    ),
    Column(
        "residual_rms_", "internals", title="RMS of the residual stream", unit="RMS", is_family=True
    ),
    Column(
        "attention_logit_max_",
        "internals",
        title="Largest attention logit",
        unit="logit",
        is_extreme=True,
        is_family=True,
    ),
    Column(
        "grad_norm_",
        "internals",
        title="Gradient norm by block before clipping",
        unit="gradient norm",
        is_family=True,
    ),
    Column(
        "update_ratio_",
        "internals",
        title="Update relative to the weights",
        unit="norm of update / norm of weights",
        is_family=True,
    ),
)
AXES = {column.name: column.series for column in COLUMNS if column.group == "axis"}
"""What a curve can be drawn over, and its name in wandb."""


def find_column(name: str) -> Column | None:
    """Return the declaration of a column, or of its family; None if it has neither."""
    for column in COLUMNS:
        if name == column.name or (column.is_family and name.startswith(column.name)):
            return column
    return None
