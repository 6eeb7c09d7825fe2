"""Ouroboros's ring computes what one device computes; it has a device less than modules."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.launch import Zygote, run_ranks
from tests.laws.ranks_run import RANKS_RUN, RINGS

pytestmark = pytest.mark.slow
WORLDS = (4, 2, 1)  # one device goes on from the others' checkpoints
CASES = [(modules, name) for modules in RINGS for name in RINGS[modules]]


@pytest.fixture(scope="module")
def found(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ring")
    results = {}
    for world_size in WORLDS:
        out = folder / f"{world_size}.json"
        run_ranks(zygote, folder, world_size, "rings", str(out), script=RANKS_RUN)
        results[world_size] = json.loads(out.read_text())
    return results


@pytest.mark.parametrize("modules, name", CASES)
def test_the_ring_computes_what_one_device_does(found, modules, name):
    """Weights, moments and what a checkpoint holds in flight, bit for bit if no norm over all
    modules is clipped."""
    case = f"K = {modules}, {name}"
    ring, one = (found[ranks][case] for ranks in (modules - 1, 1))
    assert len(ring["rows"]) == 12
    if "optim.grad_clip=0" in RINGS[modules][name]:
        assert ring["digests"] == one["digests"]
    # Muon orthogonalizes in bf16, which makes more of a last bit.
    rel = 1e-5
    if "muon" in name:
        rel = 5e-3
    for have, want in zip(ring["rows"], one["rows"], strict=True):
        assert have.keys() == want.keys()
        for column, value in want.items():
            assert have[column] == (value if value is None else pytest.approx(value, rel=rel)), (
                column
            )


@pytest.mark.parametrize("modules, name", CASES)
def test_stopping_and_continuing_moves_no_bit(found, modules, name):
    for ranks in (1, modules - 1):
        whole = found[ranks][f"K = {modules}, {name}"]
        resumed = whole["resumed"]
        assert resumed["rows"] == whole["rows"][6:]
        assert resumed["digests"] == whole["digests"]


@pytest.mark.parametrize("modules", RINGS)
def test_each_rank_holds_its_modules_only(found, modules):
    """Rank 0 has the first and the last; they share the tied matrix."""
    ring, one = (found[ranks][f"K = {modules}, plain"] for ranks in (modules - 1, 1))
    assert sum(ring["held"]) == one["held"][0]
    assert max(ring["held"]) < 0.65 * one["held"][0]


@pytest.mark.parametrize("modules, name", CASES)
def test_one_device_goes_on_from_a_rings_checkpoint(found, modules, name):
    case = f"K = {modules}, {name}"
    continued = found[1][f"{case}, from a ring"]
    whole = found[1][case]["rows"][6:]
    if "optim.grad_clip=0" in RINGS[modules][name]:
        assert continued == whole
    rel = 5e-3 if "muon" in name else 1e-5
    for have, want in zip(continued, whole, strict=True):
        assert have["step"] == want["step"]
        assert have["loss"] == pytest.approx(want["loss"], rel=rel)
