"""SimiGrad (Qin, Rajbhandari, Ruwase, Yan, Yang, He, NeurIPS 2021)."""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass

from efftrain_cli.section import SECTION


@dataclass(frozen=True, kw_only=True, config=SECTION)
class SimiGrad:
    """SimiGrad: adapt the batch size so that the gradients of the batch's two halves keep a given cosine similarity."""

    target: float
    """gamma, the cosine similarity to hold, in (-1, 1)."""
    min_batch_size: int
    """Smallest batch, in sequences."""
    max_batch_size: int
    """Largest batch, in sequences."""
    quantum: int = 1
    """Batch sizes are multiples of this, in sequences."""
    interval: int = 1
    """Steps between two decisions."""
    window: int = 1
    """Measurements averaged for one decision."""
    lr_scaling: Literal["sqrt", "linear", "none"] = "sqrt"
    """How the learning rate follows the batch size relative to train.batch_size."""
    mode: Literal["default", "reference"] = "default"
    """"reference" follows the released code's batch sizes exactly, defects included."""
