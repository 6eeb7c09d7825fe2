"""Our trainer and a compiled plain loop, in alternation in one process."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu.measuring import Bench, Figure, Part, figure


def plain_loop(bench: Bench) -> Iterator[Figure]:
    from side_by_side import compare

    name, dtype = ("4x128", "fp32") if bench.smoke else ("gpt2-117m-cuda", "bf16")
    result = compare(name, dtype, bench.device, 1 if bench.smoke else 5)
    ratios = [
        theirs[0] / ours[0]
        for ours, theirs in zip(
            *(result["times"][0][s] for s in ("ours", "reference")), strict=True
        )
    ]  # type: ignore
    note = f"{min(ratios):.3f} to {max(ratios):.3f} in {len(ratios)} rounds"
    yield figure("ours / plain loop, 117M 32 x 1024", result["wall_ratio"], "times as fast", note)
    yield figure("plain loop", result["reference_tokens_per_second"], "tokens/s")
    yield figure("ours beside it", result["ours_tokens_per_second"], "tokens/s")


PARTS = (Part("plain loop", plain_loop, 120),)
