"""Our GELU and PyTorch's, value and gradient, in alternation: `python
benchmarks/speed/fast_gelu.py`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from datetime import date

import torch
import torch.nn.functional as F
from torch import Tensor

from efftrain_cli.model.gelu import gelu

SHAPES = {"4 x 128": (768, 512), "6 x 384": (2048, 1536), "GPT-2 117M, 1 x 1024": (1024, 3072)}


def main(rounds: int = 60) -> None:
    print(
        f"{date.today()}, torch {torch.__version__}, {torch.get_num_threads()} threads, fp32;"
        f" median ms of {rounds}"
    )
    print(
        f"{'hidden layer of':24s}{'PyTorch: value':>16s}{'gradient':>10s}"
        f"{'ours: value':>14s}{'gradient':>10s}"
    )
    forms: dict[str, Callable[[Tensor], Tensor]] = {
        "theirs": lambda x: F.gelu(x, approximate="tanh"),
        "ours": gelu,
    }
    for name, shape in SHAPES.items():
        x, upstream = torch.randn(shape, requires_grad=True), torch.randn(shape)
        times: dict[tuple[str, str], list[float]] = {
            (form, part): [] for form in forms for part in ("value", "gradient")
        }
        for _ in range(rounds):
            for form, function in forms.items():
                start = time.perf_counter()
                y = function(x)
                middle = time.perf_counter()
                torch.autograd.grad(y, x, upstream)
                times[form, "value"].append(middle - start)
                times[form, "gradient"].append(time.perf_counter() - middle)
        medians = {key: f"{1000 * statistics.median(values):.2f}" for key, values in times.items()}
        print(
            f"{name:24s}{medians['theirs', 'value']:>16s}{medians['theirs', 'gradient']:>10s}"
            f"{medians['ours', 'value']:>14s}{medians['ours', 'gradient']:>10s}"
        )


if __name__ == "__main__":
    main()
