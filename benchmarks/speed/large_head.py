"""What a large vocabulary costs in the head: cross-entropy with one buffer of logits against the
plain form.

    python benchmarks/speed/large_head.py --n-embd 384 768 --tokens 2048 --vocab 50257
    python benchmarks/speed/large_head.py --pieces 1 4 16 64 --n-embd 384 --rounds 6

CPU seconds of one thread, so that neighbours on the machine disturb them less; memory is the peak
beyond what the process held before. Each form runs in a process of its own. "plain, rows =
vocabulary" has no padding to cut off, as in nanoGPT. `--pieces` times the one buffer with pieces of
so many MiB, in turn, by the clock, on all threads.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

from efftrain_cli.bench import peak_resident_bytes
from efftrain_cli.model import cross_entropy
from efftrain_cli.model.cross_entropy import summed_cross_entropy

FORMS = ("one buffer", "plain", "plain, rows = vocabulary")


def measure(form: str, tokens: int, n_embd: int, vocab_size: int, rounds: int) -> None:
    """Prints the CPU seconds of forward and backward, best of `rounds`, and the memory, MiB."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = -(-vocab_size // 128) * 128
    if form == FORMS[2]:
        vocab_size = rows
    x = torch.randn(tokens, n_embd, requires_grad=True)
    weight = (0.05 * torch.randn(rows, n_embd)).requires_grad_()
    targets = torch.randint(vocab_size, (tokens,))
    held = peak_resident_bytes()
    seconds = []
    for _ in range(rounds):
        x.grad = weight.grad = None
        start = time.process_time()
        if form == FORMS[0]:
            loss = summed_cross_entropy(x, weight, targets, vocab_size)
        else:
            loss = F.cross_entropy(
                F.linear(x, weight)[:, :vocab_size].float(), targets, reduction="sum"
            )
        middle = time.process_time()
        (loss / tokens).backward()
        seconds.append((time.process_time() - start, middle - start))
    total, forward = min(seconds)
    memory = (peak_resident_bytes() - held) / 2**20
    print(
        f"{form:26s} {n_embd:6d} {forward:9.2f} {total - forward:9.2f} {total:9.2f} {memory:9.0f}",
        flush=True,
    )


def measure_pieces(
    pieces: list[int], tokens: int, n_embd: int, vocab_size: int, rounds: int
) -> None:
    """Print the median seconds of forward and backward for each size of a piece, MiB; the first
    round is not counted."""
    torch.manual_seed(0)
    x = torch.randn(tokens, n_embd, requires_grad=True)
    rows = -(-vocab_size // 128) * 128
    weight = (0.05 * torch.randn(rows, n_embd)).requires_grad_()
    targets = torch.randint(vocab_size, (tokens,))
    seconds: dict[int, list[float]] = {size: [] for size in pieces}

    for round_ in range(rounds):
        for size in pieces:
            cross_entropy._CHUNK_BYTES["cpu"] = size << 20
            x.grad = weight.grad = None
            start = time.perf_counter()
            (summed_cross_entropy(x, weight, targets, vocab_size) / tokens).backward()
            if round_:
                seconds[size].append(time.perf_counter() - start)

    for size, values in seconds.items():
        spread = f"{min(values):.2f} to {max(values):.2f}"
        print(f"{size:4d} MiB: {statistics.median(values):.2f} s ({spread})")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--n-embd", type=int, nargs="+", default=[384, 768])
    parser.add_argument("--vocab", type=int, default=50257)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--form", choices=FORMS, help=argparse.SUPPRESS)
    parser.add_argument("--pieces", type=int, nargs="+", help="sizes of a piece to time, MiB")
    options = parser.parse_args()
    if options.pieces:
        for n_embd in options.n_embd:
            print(f"n_embd {n_embd}, {torch.get_num_threads()} threads")
            measure_pieces(options.pieces, options.tokens, n_embd, options.vocab, options.rounds)
        return
    if options.form:
        measure(options.form, options.tokens, options.n_embd[0], options.vocab, options.rounds)
        return
    print(
        f"torch {torch.__version__}, fp32, {options.tokens} tokens, vocabulary {options.vocab}, 1"
        " thread; CPU seconds, MiB"
    )
    print(
        f"{'form':26s} {'n_embd':>6s} {'forward':>9s} {'backward':>9s} {'both':>9s} {'memory':>9s}"
    )
    for n_embd in options.n_embd:
        for form in FORMS:
            command = [
                sys.executable,
                __file__,
                "--form",
                form,
                "--n-embd",
                str(n_embd),
                "--tokens",
                str(options.tokens),
            ]
            subprocess.run(
                [*command, "--vocab", str(options.vocab), "--rounds", str(options.rounds)],
                check=True,
            )


if __name__ == "__main__":
    main()
