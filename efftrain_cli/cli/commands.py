"""Every command, by importing its module; the order here is the order of `efftrain --help`."""

# ruff: noqa: F401, I001

from __future__ import annotations

from efftrain_cli.cli import pretrain
from efftrain_cli.cli import bench
from efftrain_cli.cli import tune_warmup
from efftrain_cli.cli import grow
from efftrain_cli.cli import prepare
from efftrain_cli.cli import recipes
from efftrain_cli.cli import sample
from efftrain_cli.cli import export
from efftrain_cli.cli import import_
from efftrain_cli.cli import compare
from efftrain_cli.cli import eval_zeroshot
from efftrain_cli.cli import runs
from efftrain_cli.cli import wandb_sync
from efftrain_cli.cli import checkpoint
from efftrain_cli.cli import sweep
from efftrain_cli.cli import verify_resume
