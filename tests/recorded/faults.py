"""Exit codes and messages of the faults in docs/reliability.md that one process can show."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file

from efftrain_cli.foundation.errors import EfftrainError
from tests.conftest import invoke
from tests.damage import flip
from tests.trained_run import write_text

ON_TEXT = (
    "pretrain --recipe small --name new --no-probe --set model.n_layer=1 --set model.n_embd=32"
    " --set model.n_head=2 --set model.seq_len=32 --set data.tokenizer=bpe:300"
    " --set data.valid_fraction=0.3 --set train.dtype=fp32 --set data.train=text.txt"
    " --set data.repeat="
)
TRAIN = f"{ON_TEXT}true --steps 3"
PREPARE = (
    "prepare --recipe small --set data.tokenizer=bpe:300 --set data.repeat=true"
    " --set data.valid_fraction=0.3 --set data.train="
)
RESUME = "pretrain --resume r --no-probe"
STEP = "runs/r/checkpoints/step-00000003"
HUGE = "--set model.n_embd=100000 --set model.n_layer=1000"


class Fault(NamedTuple):
    """What is done to the home folder, and the command that meets it."""

    line: str
    damage: Callable[[], object] = lambda: None
    environment: tuple[tuple[str, str], ...] = ()


def cut(path: str) -> Callable[[], object]:
    return lambda: os.truncate(path, Path(path).stat().st_size // 2)


def write(path: str, content: str | bytes) -> Callable[[], object]:
    data = content.encode() if isinstance(content, str) else content
    return lambda: Path(path).write_bytes(data)


def edit(path: str, **values: Any) -> Callable[[], object]:
    """Change keys of a JSON file."""

    def change() -> None:
        content = json.loads(Path(path).read_text("utf-8"))
        Path(path).write_text(json.dumps({**content, **values}), "utf-8")

    return change


def change_weights(dtype: torch.dtype, value: float) -> Callable[[], object]:
    """Change one tensor of an export."""

    def change() -> None:
        path = "hf/model.safetensors"
        tensors = load_file(path)
        tensors["transformer.ln_f.bias"] = torch.full((32,), value).to(dtype)
        save_file(tensors, path)

    return change


def damage_shards() -> None:
    invoke(f"{PREPARE}text.txt")
    for path in Path("cache").rglob("*.bin"):
        flip(path, 800)


FAULTS = {
    "F10 another shape": Fault(f"{RESUME} --set model.n_layer=3"),
    "F10 another rate": Fault(f"{RESUME} --set optim.lr=3e-4"),
    "F11 a flipped bit": Fault(
        "sample r --prompt x", lambda: flip(Path(STEP, "model.safetensors"), 9000)
    ),
    "F12 weights cut short": Fault("export r --out out", cut(f"{STEP}/model.safetensors")),
    "F12 a manifest of garbage": Fault("sample r --prompt x", write(f"{STEP}/manifest.json", "{")),
    "F22 a rate without end": Fault(f"{TRAIN} --set optim.lr=1e308 --set optim.min_lr=1e307"),
    "F26 a model without end": Fault(f"{TRAIN} {HUGE}"),
    "F32 a name that leaves": Fault(TRAIN.replace("--name new", "--name ../../x")),
    "F32 a reserved name": Fault(TRAIN.replace("--name new", "--name con")),
    "F33 a name that is taken": Fault(TRAIN.replace("--name new", "--name r")),
    "F34 shards with a flipped bit": Fault(f"{PREPARE}text.txt --verify-data full", damage_shards),
    "F37 a budget beyond the text": Fault(f"{ON_TEXT}false"),
    "F38 validation text that is trained on": Fault(f"{PREPARE}text.txt --set data.valid=text.txt"),
    "F39 no JSON": Fault(f"{PREPARE}a.jsonl", write("a.jsonl", '{"text": "a"}\n{"text": \n')),
    "F39 no such field": Fault(f"{PREPARE}a.jsonl", write("a.jsonl", '{"words": "a"}\n')),
    "F39 no UTF-8": Fault(f"{PREPARE}a.txt", write("a.txt", b"fine\nnot \xff fine\n")),
    "F39 no text": Fault(f"{PREPARE}a.txt", write("a.txt", "")),
    "F39 no file": Fault(f"{PREPARE}books/"),
    "F40 a typo": Fault(f"{TRAIN} --set optim.lrr=1"),
    "F40 a wrong type": Fault(f"{TRAIN} --set model.n_layer=two"),
    "F41 sizes that do not fit": Fault(f"{TRAIN} --set model.n_head=5"),
    "F52 a newer origin": Fault(RESUME, edit("runs/r/origin.json", schema_version=2)),
    "F61 an origin cut short": Fault(
        "sample r --prompt x", write("runs/r/origin.json", '{"schema_version": 1, "recipe": "sm')
    ),
    "F61 an origin with a list": Fault("runs show r", write("runs/r/origin.json", "[1, 2]")),
    "F74 a billion layers": Fault("import hf", edit("hf/config.json", n_layer=10**9)),
    "F74 no number": Fault("import hf", edit("hf/config.json", n_layer=None)),
    "F74 more layers than weights": Fault("import hf", edit("hf/config.json", n_layer=3)),
    "F75 weights that are not finite": Fault("import hf", change_weights(torch.float32, torch.nan)),
    "F87 weights in int8": Fault("import hf", change_weights(torch.int8, 1)),
    "F76 a prompt that is no text": Fault("sample r --prompt 'a\udcffb'"),
    "F86 a run without checkpoints": Fault(
        "sample r --prompt x", lambda: shutil.rmtree("runs/r/checkpoints")
    ),
    "F97 a billion seeds": Fault("sweep small --seeds 0..1000000000"),
    "F97 a growth without end": Fault("grow r --operator depth:100000"),
    "F98 an unusable number": Fault(TRAIN, environment=(("WORLD_SIZE", "two"),)),
    "F98 an unusable folder": Fault(TRAIN, environment=(("EFFTRAIN_RUNS", "~nosuchuser/runs"),)),
}


def record() -> dict[str, Any]:
    """Return [exit code, message] by fault; paths, hashes, sizes and times are replaced."""
    with TemporaryDirectory() as name:
        home, copy = Path(name).resolve() / "home", Path(name) / "copy"
        environment = {"EFFTRAIN_RUNS": "runs", "EFFTRAIN_CACHE": "cache", "COLUMNS": "200"}
        home.mkdir()
        with chdir(home), patch.dict(os.environ, environment):
            write_text(home)
            invoke(TRAIN.replace("--name new", "--name r"))
            invoke("export r --out hf")
        shutil.copytree(home, copy)
        answers = {}
        for what, fault in FAULTS.items():
            shutil.rmtree(home)
            shutil.copytree(copy, home)
            with chdir(home), patch.dict(os.environ, {**environment, **dict(fault.environment)}):
                fault.damage()
                answers[what] = answer(fault.line, str(home))
        return answers


def answer(line: str, folder: str) -> tuple[int, str]:
    """Return a command's exit code and what it said at its end."""
    result = invoke(line)
    code, said = result.exit_code, result.output
    if isinstance(result.exception, EfftrainError):
        code, said = result.exception.exit_code, str(result.exception)
    elif result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    said = said.replace(folder, "HOME")
    said = re.sub(r"\b[0-9a-f]{12,64}\b", "HASH", said)
    said = re.sub(r"\b[\d.,]+ (([kMGT]?B|bytes|s|ms|min)\b)", r"N \1", said)
    return code, said
