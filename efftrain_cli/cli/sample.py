"""`efftrain sample`."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from efftrain_cli.cli.app import app
from efftrain_cli.cli.options import CheckpointOption, Device, RunArgument
from efftrain_cli.foundation.console import printable, say
from efftrain_cli.foundation.errors import UsageError


@app.command(
    rich_help_panel="Start here",
    examples=(
        'efftrain sample small-seed1234 --prompt "def "',
        "efftrain sample small-seed1234 --count 3 --temperature 0.6 --top-p 0.9",
    ),
)
def sample(
    run: RunArgument,
    prompt: Annotated[
        str, Option(help="Text to continue; empty is the beginning of a document.")
    ] = "",
    max_tokens: Annotated[
        int, Option(min=1, help="Most tokens to write; an end-of-text token ends the text earlier.")
    ] = 200,
    temperature: Annotated[
        float,
        Option(
            help="0: always the most likely token;"
            " below 1: more conservative; above 1: more varied."
        ),
    ] = 0.8,
    top_k: Annotated[
        int | None,
        Option(min=1, help="Sample from the k most likely tokens only.", show_default="all"),
    ] = None,
    top_p: Annotated[
        float | None,
        Option(
            help="Sample from the most likely tokens"
            " whose probabilities add up to this, such as 0.9.",
            show_default="all",
        ),
    ] = None,
    seed: Annotated[int, Option(min=0, help="Same seed, same text.")] = 0,
    count: Annotated[
        int, Option(min=1, help="Texts to write, with seeds counting up from --seed.")
    ] = 1,
    checkpoint: CheckpointOption = None,
    device: Device = "auto",
) -> None:
    """Write text with a trained model."""
    import sys

    from efftrain_cli.run.names import find_run

    if any("\ud800" <= character <= "\udfff" for character in prompt):
        raise UsageError("--prompt holds bytes that are not UTF-8 text\n  give it as UTF-8")
    if temperature != 0 and not 0.001 <= temperature <= 1000:
        raise UsageError(
            f"--temperature {temperature:g} cannot be sampled with\n"
            "  give 0 for the most likely token, or a number from 0.001 to 1000"
        )
    if top_p is not None and not 0 < top_p <= 1:
        raise UsageError(
            f"--top-p {top_p:g} is no share of the probability\n"
            "  give a number above 0 and at most 1, such as 0.9"
        )
    run = find_run(run).name  # before PyTorch is imported, which takes seconds
    from efftrain_cli.model.generate import Sampling
    from efftrain_cli.training.loading import generate_text, load_trained_model
    from efftrain_cli.training.session import choose_device

    trained = load_trained_model(run, checkpoint, choose_device(device))
    length, context = len(trained.tokenizer.encode([prompt])[0]), trained.model.config.seq_len
    if length > context:
        say(f"note: the prompt has {length:,} tokens; the model reads the last {context:,}")
    for number in range(count):
        if count > 1:
            print(f"--- seed {seed + number}")
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed + number)
        sys.stdout.write(prompt)
        for piece in generate_text(trained.model, trained.tokenizer, prompt, sampling, max_tokens):
            sys.stdout.write(printable(piece, keep="\n\t") if sys.stdout.isatty() else piece)
            sys.stdout.flush()
        sys.stdout.write("\n")
