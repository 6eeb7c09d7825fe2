"""`efftrain accumulation`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from efftrain_cli.cli.app import app
from efftrain_cli.cli.complete import run_names
from efftrain_cli.cli.options import CheckpointOption, Device
from efftrain_cli.foundation.errors import UsageError

Operands = Literal["fp32", "bf16", "fp8_e4m3", "fp8_e5m2"]


@app.command(
    rich_help_panel="Use a trained model",
    examples=(
        "efftrain accumulation small-seed1234",
        "efftrain accumulation small-seed1234 --operands bf16 --error 0.01",
        "efftrain accumulation --shape 48x1600 --tokens 524288",
    ),
)
def accumulation(
    run: Annotated[
        str | None,
        Argument(
            help="Name of a run; leave it out with --shape.",
            metavar="RUN",
            autocompletion=run_names,
            show_default=False,
        ),
    ] = None,
    checkpoint: CheckpointOption = None,
    error: Annotated[
        float,
        Option(
            min=1e-6,
            max=1,
            help="Relative error allowed in a product; VRR's threshold is at about 0.04.",
        ),
    ] = 0.04,
    operands: Annotated[
        Operands | None,
        Option(
            metavar="FORMAT",
            help="Format of activations and weights: fp32, bf16, fp8_e4m3 or fp8_e5m2.",
            show_default="the recipe's narrow ones, or fp8_e5m2",
        ),
    ] = None,
    gradient_operands: Annotated[
        Operands | None,
        Option(
            metavar="FORMAT", help="Format of incoming gradients.", show_default="as --operands"
        ),
    ] = None,
    samples: Annotated[int, Option(min=16, help="Outputs of each product to sum again.")] = 4096,
    out: Annotated[
        Path | None,
        Option(help="Folder for the table and the plot.", show_default="accumulation/ in the run"),
    ] = None,
    shape: Annotated[
        str | None,
        Option(
            help="Layers x width, as 48x1600: predict for a model that was not run.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[
        int, Option(min=1, max=4_000_000, help="With --shape: tokens of a micro-batch.")
    ] = 16384,
    vocab: Annotated[
        int, Option(min=1, max=4_000_000, help="With --shape: rows of the vocabulary.")
    ] = 50304,
    device: Device = "auto",
) -> None:
    """Measure how many mantissa bits a model's sums need, with and without chunks, and what theory
    predicts."""
    if (run is None) == (shape is None):
        raise UsageError(
            "accumulation measures a RUN, or predicts for --shape\n  give one of the two"
        )
    if shape is not None:
        _predict(shape, tokens, vocab, operands or "fp8_e5m2", gradient_operands)
        return
    assert run is not None
    from efftrain_cli.foundation.files import make_folder
    from efftrain_cli.run.names import find_run

    path = find_run(run)
    folder = out or path / "accumulation"
    if out is None:
        make_folder(folder)
    from efftrain_cli.accumulation import analyse, lines, save
    from efftrain_cli.foundation.console import print_folded

    analysis = analyse(
        path.name,
        checkpoint=checkpoint,
        device=device,
        operands=operands,
        gradient_operands=gradient_operands,
        samples=samples,
    )
    print_folded("\n".join(lines(analysis, error)), indent=0)
    print()
    if out is None:
        folder /= f"step-{analysis.step:08d}"
    for path in save(analysis, folder, error):
        print_folded(f"written: {path}")


def _predict(
    shape: str, tokens: int, vocab: int, operands: Operands, gradient_operands: Operands | None
) -> None:
    from efftrain_cli.foundation.console import print_folded, table_lines
    from efftrain_cli.methods.variance_retention import (
        needed_bits,
        parse_shape,
        product_bits,
        sums_of,
    )

    try:
        depth, width = parse_shape(shape)
    except ValueError as error:
        raise UsageError(f"--shape {error}") from None
    gradients = gradient_operands or operands
    print_folded(
        f"GPT-2 of {depth} layers x {width}, {tokens:,} tokens in a micro-batch, vocabulary"
        f" {vocab:,}; {operands} operands, {gradients} gradients: predicted, not measured\n",
        indent=0,
    )
    rows = []
    for layer, role, n in sums_of(width, tokens, vocab):
        bits = product_bits(operands, operands if role == "forward" else gradients)
        needed = (str(needed_bits(bits, n, chunk)) for chunk in (0, 64, 128))
        rows.append((layer, role, str(n), str(bits), *needed))
    head = "layer|role|n|m_p|VRR|c64|c128"
    print("\n".join(table_lines(tuple(head.split("|")), rows)))
    print_folded(
        "\nn: products in a sum; m_p: mantissa bits of a product;"
        " VRR: mantissa bits by theory (Sakr et al. 2019), whole and in chunks of 64 and 128."
        " It assumes products of mean zero without outliers;"
        " a model that was trained may need more: measure one with `efftrain accumulation RUN`.",
        indent=0,
    )
