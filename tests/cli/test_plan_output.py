"""`efftrain pretrain --plan`: what a run costs, before anything is spent."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from efftrain_cli.foundation.errors import RecipeError, UsageError
from efftrain_cli.plan import devices
from efftrain_cli.plan.devices import device_here
from efftrain_cli.plan.rates import Rate, remember_rate
from tests.conftest import cli, python, sets

RECIPE = """
[model]
n_layer = 2
n_head = 2
n_embd = 32
seq_len = 32
[data]
tokenizer = "bpe:300"
[optim]
lr = 3e-3
[train]
tokens = 10_240
batch_size = 8
dtype = "fp32"
[eval]
every = 100
[checkpoint]
keep = 3
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tiny.toml").write_text(RECIPE)
    monkeypatch.setenv("EFFTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path


def plan(*words: str) -> dict[str, str]:
    """The lines of what it costs, by their first word."""
    done = cli("pretrain --recipe tiny.toml --plan", *words)
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines() if line[:1].isalpha()]
    return {name: rest for name, rest in lines}


def rate(source: str, flops: float, day: int, **values: Any) -> None:
    """Keep a rate of that day, by default of a model of 2 x 32 on the CPU."""
    shape = {"n_layer": 2, "n_embd": 32, "flops_per_token": 6.0 * 12 * 2 * 32**2}
    place = {"device": "cpu", "device_kind": "cpu", "time": f"2026-01-{day:02}T00:00:00+00:00"}
    remember_rate(Rate(**{**shape, **place, **values}, source=source, flops_per_second=flops))


def test_six_lines_are_those_of_the_formulas(home):
    """320 rows of vocabulary: N = 2 (12 x 32^2 + 13 x 32) + 2 x 32 + 320 x 32 = 35,712, and 1,024
    more of positions. 10,240 tokens of 6 N + 12 x 2 x 32 x 32 FLOPs are 2.446 GFLOPs; 12 bytes a
    parameter are 441 kB."""
    shown = plan()
    assert list(shown) == ["text", "model", "steps", "costs", "memory", "disk"]
    assert shown["text"].startswith("stdlib: not prepared, ")
    assert shown["model"] == "2 x 32, context 32: 36.7K parameters, fp32"
    assert shown["steps"] == "40 of 256 tokens; lr 0.003, cosine to 0"
    assert shown["costs"] == "2.45 GFLOPs; time unknown: `efftrain bench tiny.toml`"
    assert shown["memory"].endswith(", micro-batches of 8 x 32")
    assert shown["disk"].startswith("3 checkpoints of 441 kB, about ")
    assert plan("--steps", "0")["steps"] == "none left"
    shorter = plan("--steps", "20")
    assert shorter["steps"].startswith("20 of 256 tokens")
    assert shorter["costs"].startswith("1.22 GFLOPs;")


def test_a_prepared_text_has_its_tokens_and_epochs(home):
    """4,000 letters and line ends in a vocabulary of bytes, a tenth held out: about 3,600 for
    training. 320 windows of 32 are 10,240 tokens."""
    letters = random.Random(1)
    lines = ["".join(letters.choices("abcdefgh", k=39)) for _ in range(100)]
    (home / "letters.txt").write_text("\n".join([*lines, ""]))
    unprepared = plan(*sets("data.train=letters.txt", "data.tokenizer=bpe:257"))
    assert unprepared["text"] == "letters.txt: not prepared, 4 kB"
    # About two bytes of text a token, and two of a token.
    assert unprepared["disk"].endswith(", about 4 kB of shards")
    changes = sets("data.train=letters.txt", "data.tokenizer=bpe:257", "data.valid_fraction=0.1")
    cli("prepare --recipe tiny.toml", *changes, *sets("data.repeat=true"))
    done = cli("pretrain tiny.toml --plan", *changes, *sets("data.repeat=true"))
    text, *_, disk = done.stdout.splitlines()
    assert text.startswith("text    letters.txt: 3,6") and text.endswith(" epochs")
    assert float(text.split()[-2]) == pytest.approx(10_240 / 3_600, abs=0.05)
    assert disk.endswith("kB"), "no shards are left to write"
    # Where the recipe does not allow it, reading it again is a mistake of the plan already.
    with pytest.raises(RecipeError, match="epochs"):
        cli("pretrain tiny.toml --plan", *changes)


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ("optim.warmup_steps=4", "lr 0.003 after 4, cosine to 0"),
        ("optim.schedule=constant", "lr 0.003, constant"),
        (
            "optim={lr = 3e-3, min_lr = 3e-4, schedule = 'wsd', decay_share = 0.2}",
            "lr 0.003, wsd over the last 20 % to 0.0003",
        ),
        # 16 + t in step t, until step 16.
        (
            "seq_len_warmup={start = 16, steps = 16, multiple = 1}",
            "length 17 to 32 from step 16 on",
        ),
        # Two sequences, one more after each 8; 8 from 2 + 3 + ... + 7 on.
        (
            "batch_size_warmup={start = 2, increment = 6, sequences = 16}",
            "batch 2 to 8 from step 9 on",
        ),
        # 1 - theta of the mean depth, 3/4: 2 - 1.5 x 0.5 = 1.25 of 2 blocks.
        ("progressive_layer_drop={theta = 0.5, steps = 0}", "1.25 blocks"),
        ("progressive_layer_drop={theta = 0.5, steps = 40}", "2 to 1.25 blocks"),
    ],
)
def test_the_steps_say_what_changes(home, change, shown):
    assert shown in plan(*sets(change))["steps"].split("; ")


def test_devices_are_assumed(home):
    """2.446 GFLOPs at 8 x 40 % of an H100's 989.5 TFLOP/s in bf16: 0.77 us. Each of 8 has one of
    the 8 sequences."""
    shown = plan("--assume", "H100 x 8 at 40%")
    assert shown["costs"] == (
        "2.45 GFLOPs, about 0 ms: 8 x 40 % of 67 TFLOP/s (assumed, no network)"
    )
    assert shown["memory"].endswith(" of 80 GB, micro-batches of 1 x 32")
    in_bf16 = plan("--assume", "h100", *sets("train.dtype=auto"))
    assert in_bf16["model"].endswith(", bf16")
    assert in_bf16["costs"].endswith(": 1 x 40 % of 990 TFLOP/s (assumed, no network)")
    assert plan("--assume", "T4 at 100 %", *sets("train.dtype=auto"))["model"].endswith(", fp32")
    long = json.loads(cli("pretrain tiny.toml --plan --format json --assume L4").stdout)
    assert long["seconds"] == pytest.approx(long["flops"] / (0.4 * 30.3e12))
    # Of four shards each has a quarter of 16 bytes a weight.
    memory = []
    for strategy in ("replicate", "shard"):
        words = sets(f"parallel.strategy={strategy}")
        done = cli("pretrain tiny.toml --plan --format json --assume", "H100 x 4", *words)
        memory.append(json.loads(done.stdout)["memory_bytes"])
    assert memory[0] - memory[1] == 3 * 4 * long["parameters"]


def test_devices_that_are_not_known_are_refused(home):
    """The published sizes of memory, GB; V100 has the larger of its two."""
    sizes = [24, 80, 40, 180, 96, 80, 141, 24, 48, 192, 24, 24, 32, 16, 32]
    assert [memory for _, memory in devices.GPUS.values()] == sizes
    for text, words in (
        ("H10", "did you mean H100"),
        ("TPU", "known devices: A10, A100, "),
        ("H100 x 0", "needs a device or more"),
        ("H100 at 0%", "above 0 to 100 %"),
        ("H100 at 101%", "above 0 to 100 %"),
    ):
        with pytest.raises(UsageError, match=words):
            devices.assumed_device(text)


def test_time_is_estimated_by_what_is_most_like_the_run(home):
    """The plan's model needs 238,848 FLOPs per token: first runs of 2 x 32, then benches, then the
    nearest FLOPs per token, then the newest."""
    assert plan()["costs"].endswith("`efftrain bench tiny.toml`")
    rate("bench of near", 1e8, 1, n_layer=3, flops_per_token=3e5)
    rate("bench of far", 1e6, 3, n_layer=9, flops_per_token=9e6)
    assert plan()["costs"].endswith(" by bench of near, a model of 3 x 32: a rough guess")
    rate("bench of same", 2.446e7, 1, flops_per_token=238_848.0)
    assert plan()["costs"] == "2.45 GFLOPs, about 1 min 40 s: 24.5 MFLOP/s by bench of same"
    rate("bench of same, later", 2.446e8, 2, flops_per_token=238_848.0)
    assert "about 10 s:" in plan()["costs"]
    # A run of 2 x 64 is another model; one of 2 x 32 is this one, older than the benches or not.
    rate("run wide", 1.2e10, 3, n_embd=64, flops_per_token=6e5, train_share=0.5)
    assert "bench of same, later" in plan()["costs"]
    rate("run own", 1.2288e10, 1, flops_per_token=6e5, train_share=0.5)
    # 10,240 tokens of 238,848 FLOPs at 12.288 GFLOP/s are 0.199 s.
    assert plan()["costs"] == "2.45 GFLOPs, about 199 ms: 12.3 GFLOP/s by run own"
    # Another machine's are not ours: a home folder may be shared.
    path = home / "cache" / "bench.jsonl"
    path.write_text("no json\n" + path.read_text().replace(os.uname().nodename, "elsewhere"))
    assert plan()["costs"].endswith("`efftrain bench tiny.toml`")


@pytest.mark.parametrize("recipe", ["gpt3-125m", "gpt2-1.5b-slw"])
def test_a_plan_of_a_shipped_recipe_is_quick(home, recipe):
    """Under 1.5 s of CPU, 0.5 s of it imports, and no heavy library."""
    code = (
        "import resource, sys\nfrom efftrain_cli.__main__ import main\n"
        "sys.argv = ['efftrain', *sys.argv[1:]]\n"
        "try:\n    main()\nfinally:\n"
        "    used = resource.getrusage(resource.RUSAGE_SELF).ru_utime\n"
        "    heavy = {'torch', 'scipy', 'pandas'} & sys.modules.keys()\n"
        "    print(used, *heavy)\n"
    )
    out = python(code, "pretrain", recipe, "--plan", "--assume", "H100", cwd=home).stdout
    *lines, last = out.splitlines()
    assert len(lines) == 6 and float(last) < 1.5, "seconds, and what was imported"


def test_json_is_one_document_with_the_costs(home):
    """40 steps of 256 tokens; memory holds 16 bytes a weight at least, each of 3 checkpoints 12."""
    found = json.loads(cli("pretrain --recipe tiny.toml --plan --format json").stdout)
    assert (found["schema_version"], found["steps"], found["tokens"]) == (2, 40, 10_240)
    assert (found["seconds"], found["vocab_size"], found["epochs"]) == (None, 300, None)
    assert found["memory_bytes"] > 16 * found["parameters"]
    assert found["disk_bytes"] == 3 * 12 * found["parameters"]


def test_a_plan_says_what_is_missing_and_too_large(home, monkeypatch):
    monkeypatch.setattr(devices, "machine_memory", lambda: 10**6)
    (home / "large.toml").write_text(RECIPE.replace("n_embd = 32", "n_embd = 64"))
    done = cli("pretrain large.toml --device cpu --plan", *sets("data.train=none.txt"))
    assert done.stdout.startswith("text    missing: data.train = 'none.txt': no such file")
    (memory,) = [line for line in done.stdout.splitlines() if line.startswith("memory ")]
    assert memory.startswith("memory  does not fit: about ")
    assert memory.endswith(", the device has 1 MB")


def test_a_driver_that_hangs_says_nothing_of_the_gpu(monkeypatch):
    def hang(query: list[str], timeout: float, **options: object) -> None:
        raise subprocess.TimeoutExpired(query, timeout)

    monkeypatch.setattr(devices, "which", lambda tool: f"/usr/bin/{tool}")
    monkeypatch.setattr(devices.subprocess, "run", hang)
    here = device_here("cuda")
    assert (here.memory, here.dtype("auto"), here.dtype("tf32")) == (0, "fp32", "fp32")


@pytest.mark.parametrize(("version", "dtype"), [("8.0", "bf16"), ("7.5", "fp32")])
def test_memory_and_number_type_are_those_of_the_device(monkeypatch, tmp_path, version, dtype):
    """Two GPUs of 81,559 MiB, of Ampere or of Turing; without them, 7 bytes of this machine."""
    asked = subprocess.CompletedProcess([], 0, 2 * f"81559, {version}\n")
    monkeypatch.setattr(devices, "which", lambda tool: f"/usr/bin/{tool}")
    monkeypatch.setattr(devices.subprocess, "run", lambda *words, **options: asked)
    monkeypatch.setattr(devices, "machine_memory", lambda: 7)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = device_here("auto")
    assert found.memory == 81_559 * 2**20
    assert found.dtype("auto") == dtype
    assert found.dtype("tf32") == dtype.replace("bf16", "tf32")
    monkeypatch.setattr(devices, "CPU_INFO", tmp_path / "cpuinfo")
    assert device_here("cpu").dtype("auto") == "fp32"
    devices.CPU_INFO.write_text("flags: fma amx_tile")
    here = device_here("cpu")
    assert (here.memory, here.dtype("auto")) == (7, "bf16")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert device_here("auto") == here
    monkeypatch.setattr(devices, "machine_memory", lambda: None)
    assert device_here("cpu").memory == 0, "unknown"
