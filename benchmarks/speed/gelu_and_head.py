"""The GELU and the head, forward and backward, against PyTorch's plain forms, in alternation.

    python benchmarks/speed/gelu_and_head.py

CPU seconds of one thread; ratios are of the same round, median and quartiles. The head is
cross-entropy over 50,257 words in rows of 50,304.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from efftrain_cli.model.gelu import gelu
from efftrain_cli.model.kernels import keep_freed_memory
from efftrain_cli.model.losses import summed_cross_entropy

Form = Callable[[], Tensor]


def compare(
    name: str,
    inputs: list[Tensor],
    upstream: Tensor,
    ours: Form,
    theirs: Form,
    rounds: int,
) -> None:
    """Print the seconds of both forms and their ratio: of a value and of the inputs' gradients,
    with `upstream` as the value's own gradient."""
    times: dict[Form, list[float]] = {ours: [], theirs: []}
    for _ in range(rounds):
        for form in (ours, theirs):
            start = time.thread_time()
            torch.autograd.grad(form(), inputs, upstream)
            times[form].append(time.thread_time() - start)
    ratios = [a / b for a, b in zip(times[ours], times[theirs], strict=True)]
    low, median, high = statistics.quantiles(ratios[1:], n=4)
    milliseconds = [1000 * min(times[form]) for form in (ours, theirs)]
    print(
        f"{name:34} {milliseconds[0]:7.1f} ms against {milliseconds[1]:7.1f} at best;"
        f" ratio {median:.2f} ({low:.2f} to {high:.2f})"
    )


def main() -> None:
    torch.set_num_threads(1)
    keep_freed_memory(torch.device("cpu"))
    capability = torch.backends.cpu.get_cpu_capability()
    print(f"torch {torch.__version__}, {capability}, one thread")
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((768, 512), (2048, 1536)):
            x = torch.randn(shape).to(dtype).requires_grad_()
            compare(
                f"gelu, {shape[0]} x {shape[1]}, {str(dtype)[6:]}",
                [x],
                torch.randn(shape).to(dtype),
                partial(gelu, x),
                partial(F.gelu, x, approximate="tanh"),
                rounds=40,
            )
    for width in (384, 768):
        x = torch.randn(2048, width, requires_grad=True)
        weight = (0.05 * torch.randn(50304, width)).requires_grad_()
        targets = torch.randint(50257, (2048,))
        compare(
            f"head, 2,048 x {width}, float32",
            [x, weight],
            torch.ones(()),
            partial(summed_cross_entropy, x, weight, targets, 50257),
            lambda x=x, w=weight, y=targets: F.cross_entropy(
                F.linear(x, w)[:, :50257], y, reduction="sum"
            ),
            rounds=4,
        )


if __name__ == "__main__":
    main()
