"""`efftrain import`: what transformers saved becomes a run that computes the same and trains on."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file

from efftrain_cli import __version__
from efftrain_cli.convert import import_hf
from efftrain_cli.data import hub
from efftrain_cli.foundation.errors import CheckpointError, DataError, EfftrainError, UsageError
from efftrain_cli.training.loading import TrainedModel, load_trained_model
from efftrain_cli.zeroshot.results import save_result
from tests.conftest import cli, sets
from tests.fake_runs import read_jsonl
from tests.trained_run import make_run

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, a run on it, and the run's export."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("EFFTRAIN_RUNS", "runs")
        make_run(folder)
        cli("export random --out hf")
    return folder


@pytest.fixture
def exported(made: Path, tmp_path: Path) -> tuple[TrainedModel, Path]:
    """The run, and its export, in a folder of the test's own."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return load_trained_model("random", None, CPU), tmp_path / "hf"


def test_export_and_import_give_the_model_back(exported, tmp_path):
    before, directory = exported
    text = sets(f"data.train={tmp_path / 'text.txt'}")
    settings = sets("optim.lr=1e-3", "train.tokens=3000")
    cli(f"import {directory} --name back", *text, *settings)
    after = load_trained_model("back", None, CPU)
    assert after.progress.step == 0 and after.recipe.optim.lr == 1e-3
    assert after.tokenizer.sha256 == before.tokenizer.sha256
    assert after.model.config == before.model.config
    tokens = torch.arange(40)[None]
    assert torch.equal(after.model(tokens), before.model(tokens))

    # And it trains on: the loss before step 1 is the imported model's.
    cli("pretrain --resume back --steps 2 --no-probe")
    rows = read_jsonl(tmp_path / "runs" / "back" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert load_trained_model("back", None, CPU).progress.step == 2
    origin = json.loads((tmp_path / "runs" / "back" / "origin.json").read_text())
    assert (
        origin["imported"]["directory"] == "hf"
        and origin["data"]["train_hash"]
        and origin["data"]["valid_windows"]
    )
    cli(f"import {directory} --name bare", *settings)
    cli("pretrain --resume bare --steps 2 --no-probe", *text)
    # From here on both have tokens of their own, as every run.
    (tmp_path / "text.txt").unlink()
    for name in ("back", "bare"):
        cli(f"pretrain --resume {name} --steps 3 --no-probe")


def test_rows_beyond_the_tokenizer_are_padding(exported, capsys):
    """Some exports pad the embedding: 20 rows more, which no token uses."""
    before, directory = exported
    tensors = load_file(directory / "model.safetensors")
    wte = tensors["transformer.wte.weight"]
    tensors["transformer.wte.weight"] = torch.cat([wte, torch.full((20, wte.shape[1]), 3.0)])
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config["vocab_size"] += 20
    (directory / "config.json").write_text(json.dumps(config))
    import_hf(directory, "padded")
    assert "20 of the embedding's 320 rows are not tokens" in capsys.readouterr().err
    after = load_trained_model("padded", None, CPU).model
    assert (
        after.config.vocab_size == wte.shape[0]
        and after.config.padded_vocab_size == wte.shape[0] + 20
    )
    tokens = torch.arange(40)[None]
    assert torch.allclose(after(tokens), before.model(tokens), atol=1e-6)


def test_refusals(exported, tmp_path):
    _, directory = exported
    with pytest.raises(UsageError, match="exists"):
        import_hf(directory, "random")
    with pytest.raises(UsageError, match=r"model\.n_layer"):
        import_hf(directory, "other", overrides=("model.n_layer=3",))
    with pytest.raises(UsageError, match="small-staged-depth has stages"):
        import_hf(directory, "other", "small-staged-depth")
    with pytest.raises(EfftrainError, match="run name"):
        import_hf(directory, "../other")
    config = json.loads((directory / "config.json").read_text())
    for changed, message in (
        ({"vocab_size": 299}, "has 300 tokens, the embedding only 299 rows"),
        ({"n_layer": 1}, "do not fit config.json: unexpected_keys: .*h.1.attn"),
    ):
        (directory / "config.json").write_text(json.dumps(config | changed))
        with pytest.raises(CheckpointError, match=message):
            import_hf(directory, "other")
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["far"] = 3_000_000_000
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(DataError, match="ids up to 3,000,000,000"):
        import_hf(directory, "other")
    (directory / "tokenizer.json").unlink()
    with pytest.raises(DataError):
        import_hf(directory, "other")
    assert not (tmp_path / "runs" / "other").exists()


def test_a_model_of_the_hub_by_its_name(exported, tmp_path, monkeypatch):
    """The Hub faked by a folder of files; other files stay there."""
    before, directory = exported
    (directory / "onnx").mkdir()
    (directory / "onnx" / "model.safetensors").write_text("large")
    monkeypatch.setattr(hub, "hub_unreachable", lambda: "")

    def download(
        name: str, *, revision: str | None, allow_patterns: list[str], local_files_only: bool
    ) -> str:
        assert not local_files_only
        copy = tmp_path / f"{name}@{revision}"
        copy.mkdir(parents=True)
        names = [str(path.relative_to(directory)) for path in directory.rglob("*.*")]
        for file in filter_repo_objects(names, allow_patterns=allow_patterns):
            shutil.copy(directory / file, copy / file)
        return str(copy)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    cli("import openai-community/gpt2@main")
    tokens = torch.arange(40)[None]
    assert torch.equal(load_trained_model("gpt2", None, CPU).model(tokens), before.model(tokens))
    origin = json.loads((tmp_path / "runs" / "gpt2" / "origin.json").read_text())
    assert origin["imported"]["source"] == "openai-community/gpt2@main"
    assert not (tmp_path / "openai-community" / "gpt2@main" / "README.md").exists()
    for name in ("no-such", "./no-such", "a/b/c"):
        with pytest.raises(UsageError, match="the Hub as owner/name"):
            cli("import", name)


def test_an_export_has_a_card_and_the_modes_of_other_files(exported, tmp_path):
    trained, directory = exported
    key = {
        "checkpoint_sha256": trained.model_sha256,
        "task": "piqa",
        "protocol": "p",
        "limit": None,
    }
    score = {"metric": "acc", "value": 0.5, "stderr": 0.25, "items": 3, "items_total": 3}
    save_result(trained.run, {"schema_version": 1, **key, **score}, [])
    old = os.umask(0o027)
    try:
        cli("export random --out second")
    finally:
        os.umask(old)
    card = (tmp_path / "second" / "README.md").read_text()
    lines = [
        *("---", "", "# random", ""),
        (
            "A GPT-2 of 2 layers x 32, 2 heads, context 64 tokens, vocabulary 300:"
            f" {trained.model.parameter_count:,} parameters. Step 10, after 10,000 tokens of"
            f" training by efftrain {__version__}, recipe `random`, seed 1234."
        ),
    ]
    assert "\n".join(lines) in card
    lines = [
        *("## Measured", "", "| task | metric | score | items | protocol |"),
        *("|---|---|---:|---:|---|", "| piqa | acc | 0.5 ± 0.25 | 3 of 3 | p |", ""),
        *("## Made from", "", "| | sha256 |", "|---|---|"),
        f"| tokenizer | `{trained.tokenizer.sha256}` |",
        f"| model.safetensors of the checkpoint | `{trained.model_sha256}` |",
        *("", "```toml", "seed = 1234"),
    ]
    assert "\n".join(lines) in card
    assert card.endswith("\n") and not card.endswith("\n\n")
    assert '\ntokenizer = "bpe:300"\n' in card and '\ntrain = "text.txt"\n' in card
    assert str(tmp_path) not in card
    assert "Nothing was measured" in (directory / "README.md").read_text()
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "second").iterdir()} == {0o640}
    text = (tmp_path / "second" / "efftrain.json").read_text()
    assert '\n  "step": 10,\n' in text, "a line a key"
    source = json.loads(text)
    assert (source["step"], source["tokens"], source["checkpoint_sha256"]) == (
        10,
        10_000,
        trained.model_sha256,
    )


@pytest.mark.parametrize("recipe", ["small-no-norm", "small-standardization"])
def test_a_recipe_without_norms_takes_the_directorys(exported, recipe):
    """The imported weights decide `norm` and `init`: the run loads, and computes what the directory
    does."""
    import_hf(exported[1], "back", recipe)
    back = load_trained_model("back", None, CPU)
    assert (back.recipe.model.norm, back.recipe.model.init) == ("layernorm", "gpt2")
    tokens = torch.arange(40)[None]
    assert torch.equal(back.model(tokens), exported[0].model(tokens))
    with pytest.raises(UsageError, match=r"without text to train on.*\n.*--from back@0 --set"):
        cli("pretrain --from back@0 --no-probe")
