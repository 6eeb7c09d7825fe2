"""Weights and configurations of GPT-2, Llama and Qwen3 as transformers stores them, both ways."""

from __future__ import annotations

import hashlib
import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from efftrain_cli.model.gpt import GPT, GPTConfig
from efftrain_cli.model.hf import read_hf, write_hf
from tests.tiny import LLAMA_SHAPE, config_of

LLAMA = config_of(n_head=4, n_embd=32, seq_len=48, vocab_size=101, **LLAMA_SHAPE)
SHAPES = {
    "gpt2": config_of(n_layer=3, n_head=4, n_embd=32, seq_len=24, vocab_size=101),
    "gpt2 wide": config_of(d_ff=40, norm_eps=1e-6),
    "llama": LLAMA,
    "llama untied": replace(LLAMA, tied=False, rope_theta=5e5),
    "llama groups": replace(LLAMA, n_kv_head=2, d_ff=40, head_dim=12),
    "qwen3": replace(LLAMA, qk_norm=True, n_kv_head=2, head_dim=16, n_head=6, tied=False),
    "qwen3 tied": replace(LLAMA, qk_norm=True, norm_eps=1e-6),
}
END_OF_TEXT = 60
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [
        {
            "id": END_OF_TEXT,
            "content": "<|endoftext|>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
    ],
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
    "post_processor": None,
    "decoder": {"type": "ByteLevel"},
    "model": {
        "type": "BPE",
        "vocab": {chr(33 + id): id for id in range(END_OF_TEXT)},
        "merges": [],
    },
}


def record() -> dict[str, Any]:
    """Return, for each shape, digests of the tensors written and read, and the configurations."""
    return {name: exchange(config) for name, config in SHAPES.items()}


def exchange(config: GPTConfig) -> dict[str, Any]:
    model = made_gpt(config)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "hf"
        write_hf(model, json.dumps(TOKENIZER), END_OF_TEXT, folder)
        back = read_hf(folder)
        config_json = json.loads((folder / "config.json").read_text("utf-8"))
        del config_json["transformers_version"]
        return {
            "written": digests(load_file(folder / "model.safetensors")),
            "config.json": config_json,
            "read": digests(dict(back.named_parameters())),
            "shape": asdict(back.config),
        }


def made_gpt(config: GPTConfig) -> GPT:
    """Return a GPT of multiples of 1/512, which no processor rounds."""
    model = GPT(config)
    draw = np.random.RandomState(46)
    with torch.no_grad():
        for parameter in model.parameters():
            made = draw.randint(-512, 513, tuple(parameter.shape)) / 512
            parameter.copy_(torch.from_numpy(made))
    return model


def digests(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Return type, shape and the beginning of the sha256 of each tensor."""
    found = {}
    for name, tensor in sorted(tensors.items()):
        data = tensor.detach().contiguous().numpy().tobytes()
        about = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        found[name] = f"{about} {hashlib.sha256(data).hexdigest()[:16]}"
    return found
