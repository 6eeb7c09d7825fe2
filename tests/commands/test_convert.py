"""`efftrain import`: what transformers saved becomes a run that computes the same and trains on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from efftrain_cli.cli.app import app
from efftrain_cli.convert import import_hf
from efftrain_cli.foundation.errors import CheckpointError, DataError, EfftrainError, UsageError
from efftrain_cli.training.trained import Trained, load_trained
from tests.trained_run import make_run

CPU = torch.device("cpu")


@pytest.fixture
def exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Trained, Path]:
    """A run, and its export."""
    monkeypatch.setenv("EFFTRAIN_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path)
    assert efftrain("export", "random", "--out", "hf").exit_code == 0
    return load_trained("random", None, CPU), tmp_path / "hf"


def efftrain(*args: str) -> Any:
    return CliRunner().invoke(app, args)


def test_export_and_import_give_the_model_back(exported: tuple[Trained, Path], tmp_path: Path) -> None:
    before, directory = exported
    settings = ("--set", f"data.train={tmp_path / 'text.txt'}", "--set", "optim.lr=1e-3", "--set", "train.tokens=3000")
    result = efftrain("import", str(directory), "--name", "back", *settings)
    assert result.exit_code == 0, result.output
    after = load_trained("back", None, CPU)
    assert after.progress.step == 0 and after.recipe.optim.lr == 1e-3
    assert after.tokenizer.sha256 == before.tokenizer.sha256
    assert after.model.config == before.model.config
    tokens = torch.arange(40)[None]
    assert torch.equal(after.model(tokens), before.model(tokens))

    # And it trains on: the loss before step 1 is the imported model's.
    result = efftrain("pretrain", "--resume", "back", "--steps", "2", "--no-probe")
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (tmp_path / "runs" / "back" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert load_trained("back", None, CPU).progress.step == 2
    origin = json.loads((tmp_path / "runs" / "back" / "origin.json").read_text())
    assert origin["imported"]["directory"] == "hf" and origin["data"]["train_hash"] and origin["data"]["valid_windows"]
    # Data that change from here on are noticed, as in every run.
    (tmp_path / "text.txt").write_text("other text, and more of it\n" * 3000)
    error = efftrain("pretrain", "--resume", "back", "--steps", "3", "--no-probe").exception
    assert isinstance(error, UsageError) and "the text has changed" in str(error)


def test_what_transformers_saved_itself(exported: tuple[Trained, Path], tmp_path: Path) -> None:
    """A randomly initialised GPT-2 of transformers, saved by transformers, with default settings (dropout 0.1 among them)."""
    transformers = pytest.importorskip("transformers")
    _, directory = exported
    size = json.loads((directory / "config.json").read_text())["vocab_size"]
    config = transformers.GPT2Config(vocab_size=size, n_positions=40, n_embd=24, n_layer=2, n_head=3)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "tokenizer.json").write_text((directory / "tokenizer.json").read_text())
    import_hf(tmp_path / "saved", "saved")
    ours = load_trained("saved", None, CPU).model
    tokens = torch.arange(40)[None]
    assert torch.allclose(ours(tokens), theirs(tokens).logits, atol=1e-4)


def test_rows_beyond_the_tokenizer_are_padding(exported: tuple[Trained, Path]) -> None:
    """Some exports pad the embedding: 20 rows more, which no token uses."""
    from safetensors.torch import load_file, save_file

    before, directory = exported
    tensors = load_file(directory / "model.safetensors")
    wte = tensors["transformer.wte.weight"]
    tensors["transformer.wte.weight"] = torch.cat([wte, torch.full((20, wte.shape[1]), 3.0)])
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config["vocab_size"] += 20
    (directory / "config.json").write_text(json.dumps(config))
    import_hf(directory, "padded")
    after = load_trained("padded", None, CPU).model
    assert after.config.vocab_size == wte.shape[0] and after.config.padded_vocab_size == wte.shape[0] + 20
    tokens = torch.arange(40)[None]
    assert torch.allclose(after(tokens), before.model(tokens), atol=1e-6)


def test_refusals(exported: tuple[Trained, Path], tmp_path: Path) -> None:
    _, directory = exported
    with pytest.raises(UsageError, match="exists"):
        import_hf(directory, "random")
    with pytest.raises(UsageError, match=r"model\.n_layer"):
        import_hf(directory, "other", overrides=("model.n_layer=3",))
    with pytest.raises(UsageError, match="no directory"):
        import_hf(tmp_path / "nothing", "other")
    with pytest.raises(EfftrainError, match="run name"):
        import_hf(directory, "../other")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"vocab_size": 299, "n_layer": 1}))
    with pytest.raises(CheckpointError, match=r"h\.1\.attn"):
        import_hf(directory, "other")
    (directory / "tokenizer.json").unlink()
    with pytest.raises(DataError):
        import_hf(directory, "other")
    assert not (tmp_path / "runs" / "other").exists()
