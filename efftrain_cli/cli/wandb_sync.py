"""`efftrain wandb-sync`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from efftrain_cli.cli.app import app
from efftrain_cli.cli.options import RunArgument


@app.command(
    "wandb-sync",
    rich_help_panel="Machine",
    examples=("efftrain wandb-sync small-seed1234 --mode online",),
)
def wandb_sync(
    run: RunArgument,
    mode: Annotated[
        Literal["offline", "online"],
        Option(help="offline writes files that `wandb sync` sends later."),
    ] = "offline",
    project: Annotated[
        str | None,
        Option(help="wandb project; without it WANDB_PROJECT, else the recipe's wandb.project."),
    ] = None,
    follow: Annotated[
        bool,
        Option(
            "--follow",
            help="Send rows as they are written until standard input closes; pretrain does this.",
        ),
    ] = False,
    tensorboard: Annotated[
        bool,
        Option("--tensorboard", help="Write files for TensorBoard instead, into RUN/tensorboard."),
    ] = False,
) -> None:
    """Rebuild a clean Weights & Biases run from metrics.jsonl: each step once, the last write
    wins."""
    from efftrain_cli.run.names import find_run
    from efftrain_cli.trackers import wandb as wandb_sync

    path = Path(run) if (Path(run) / "recipe.toml").is_file() else find_run(run)
    if tensorboard:
        from efftrain_cli.trackers import tensorboard as board

        folder, rows = board.write(path, follow)
        print(f"{rows:,} rows for TensorBoard; see them with: tensorboard --logdir {folder}")
        return
    send = wandb_sync.follow if follow else wandb_sync.sync
    synced = send(path, mode, project)
    folder = path / "wandb"
    print(f"{synced.rows:,} rows as wandb run {synced.id} ({synced.mode}), files in {folder}")
    if synced.mode == "offline" and not follow:
        print(f"send them with: wandb sync {folder}/offline-run-*-{synced.id}")
