"""Damaged, missing, half-written and malicious checkpoints."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from itertools import product
from pathlib import Path

import pytest
import torch

from efftrain_cli.foundation.errors import CheckpointError
from efftrain_cli.recipe.recipe import dump_recipe, load_recipe
from efftrain_cli.run.directory import checkpoints_of, new_run
from efftrain_cli.run.manifest import WITHOUT_OPTIMIZER, keep_weights, verify_checkpoint
from efftrain_cli.training.loading import load, read_recipe
from tests.conftest import REPOSITORY
from tests.damage import flips
from tests.faults.damage import RECIPE, call, newest_checkpoint, seal, step_of, truncate
from tests.launch import Laboratory
from tests.tiny import changed, fresh
from tests.trained_run import make_run, write_checkpoint


def test_two_hundred_flipped_bits(run, capfd):
    """F11: each is found as the checkpoint is read, and named; the checkpoint before takes over."""
    path = checkpoints_of(run.path)[-1]
    files = sorted(path.iterdir())
    state = fresh(RECIPE, 300)
    # As many of each file, so that the small files have their share; the manifest itself is one of
    # them.
    for file in files:
        is_manifest = file.name == "manifest.json"
        # A digit of a sha256 in the manifest speaks of the file that it belongs to.
        named = path.name if is_manifest else file.name
        for _ in flips(file, 200 // len(files)):
            with pytest.raises(CheckpointError, match=named):
                if is_manifest:
                    verify_checkpoint(path)
                else:
                    load(path, state, RECIPE)
        for _ in flips(file, 1):
            assert step_of(newest_checkpoint(run)) == 5
            assert named in capfd.readouterr().err
    verify_checkpoint(path)


def garbage(path: Path) -> None:
    path.write_bytes(b'{"files": 7, \xff')


def other_json(path: Path) -> None:
    path.write_text("[]")


def older_by_content(path: Path) -> None:
    """A manifest that lists nothing, but is sound in itself."""
    for other in path.parent.iterdir():
        if other != path:
            other.rename(other.with_name(f"{other.name}.away"))
    seal(path.parent)


DAMAGES = [
    *product(
        ("model.safetensors", "optimizer.safetensors", "progress.json", "recipe.toml"),
        (truncate, Path.unlink),
    ),
    *product(("manifest.json",), (truncate, Path.unlink, garbage, other_json, older_by_content)),
]


def test_a_file_that_is_damaged_or_missing(run, tmp_path, capfd):
    """F12: one warning, and the checkpoint before is taken."""
    newest = checkpoints_of(run.path)[-1]
    shutil.copytree(newest, tmp_path / "sound")
    for file, damage in DAMAGES:
        damage(newest / file)
        assert step_of(newest_checkpoint(run)) == 5, (file, damage)
        (warning,) = capfd.readouterr().err.splitlines()
        assert newest.name in warning
        shutil.rmtree(newest)
        shutil.copytree(tmp_path / "sound", newest)
    (run.path / "checkpoints" / "step-00000020").mkdir()  # named like one, and empty
    assert step_of(newest_checkpoint(run)) == 10
    assert "step-00000020/manifest.json" in capfd.readouterr().err


def test_a_checkpoint_that_keeps_its_weights_alone(run, capfd):
    """As a race leaves it: fit to be sampled from, not to be resumed."""
    newest = checkpoints_of(run.path)[-1]
    keep_weights(newest)
    assert {path.name for path in newest.iterdir()} == {*WITHOUT_OPTIMIZER, "manifest.json"}
    assert step_of(newest_checkpoint(run)) == 5
    assert "does not list optimizer.safetensors" in capfd.readouterr().err
    assert verify_checkpoint(newest) == WITHOUT_OPTIMIZER
    keep_weights(checkpoints_of(run.path)[0])
    with pytest.raises(CheckpointError, match=r"begin again: efftrain pretrain .*r/recipe\.toml"):
        newest_checkpoint(run)


def test_no_valid_checkpoint_left(run):
    """F11: exit code 3, every bad file named."""
    for path in checkpoints_of(run.path):
        truncate(path / "optimizer.safetensors")
    with pytest.raises(CheckpointError) as raised:
        newest_checkpoint(run)
    assert raised.value.exit_code == 3
    assert "step-00000005/optimizer.safetensors" in str(raised.value)
    assert "step-00000010/optimizer.safetensors" in str(raised.value)


@pytest.mark.parametrize(
    "change, message",
    [
        ("model.n_embd=32", r"model\.safetensors: tensor .* has shape"),
        ("model.n_layer=3", r"tensor h\.2\.\S+ is not part of"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path, change, message):
    other = changed(RECIPE, change)
    path = tmp_path / "step-00000003"
    write_checkpoint(path, fresh(other, 300), dump_recipe(other))
    with pytest.raises(CheckpointError, match=message):
        load(path, fresh(RECIPE, 300), RECIPE)


def test_segments_follow_the_rows_where_the_events_are_lost(run):
    """F58; rows that waited beside a full disk may come last."""
    run.log([{"step": 1, "segment": 3}, {"step": 2, "segment": 0}])
    (run.path / "events.jsonl").unlink()
    assert run.next_segment() == 4
    assert run.next_segment(after=7) == 8
    with new_run("new", "", {}) as new:
        assert new.next_segment() == 0


class Bomb:
    """Unpickling it creates the canary."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return Path.touch, (self.canary,)


def test_a_malicious_pickle_is_never_run(random_run, tmp_path):
    """F14: pickles where checkpoints, tokenizers and recipes are read, with manifests that vouch
    for them."""
    canary = tmp_path / "canary"
    pickled = tmp_path / "bomb.pt"
    torch.save(Bomb(canary), pickled)
    bombs = [pickle.dumps(Bomb(canary)), pickled.read_bytes()]
    pickle.loads(bombs[0])
    assert canary.exists(), "the bomb works"
    canary.unlink()
    recipe = load_recipe(str(random_run / "recipe.toml"))
    checkpoint = random_run / "checkpoints" / "step-00000010"
    files = ("model.safetensors", "optimizer.safetensors", "progress.json", "recipe.toml")
    for bomb, file in product(bombs, files):
        sound = (checkpoint / file).read_bytes()
        (checkpoint / file).write_bytes(bomb)
        seal(checkpoint)
        with pytest.raises(CheckpointError):
            if file == "recipe.toml":
                read_recipe(checkpoint)
            else:
                load(checkpoint, fresh(recipe, 300), recipe)
        (checkpoint / file).write_bytes(sound)
    seal(checkpoint)
    (random_run / "tokenizer.json").write_bytes(bombs[0])
    assert call("sample", "r", "--prompt", "x")[0] == 3
    assert call("pretrain", "small", "--set", f"data.tokenizer={pickled}")[0] in (2, 3)
    assert call("pretrain", str(pickled))[0] == 2
    assert not canary.exists()


def test_no_module_can_unpickle():
    """F14: no name through which Python runs a file's code stands anywhere in the package."""
    runs_code = re.compile(
        r"(import|from) (c?pickle|dill|joblib|cloudpickle|shelve|marshal)\b"
        r"|torch\.load\b|from torch import .*\bload\b|distributed\.checkpoint"
        r"|read_pickle|allow_pickle=(?!False)",
        re.IGNORECASE,
    )
    sources = (REPOSITORY / "efftrain_cli").rglob("*.py")
    assert [path.name for path in sources if runs_code.search(path.read_text("utf-8"))] == []


def test_a_changed_recipe_is_refused_at_resume(lab):
    """F10."""
    recipe = lab.recipe()
    lab.train("r", "--steps", "5", recipe=recipe)
    resume = ("r", "--steps", "6")

    process = lab.resume(*resume, "--set", "model.n_layer=3", code=3)
    assert "model.n_layer: 2 -> 3" in process.errors

    process = lab.resume(*resume, "--set", "optim.lr=1e-3", code=2)
    assert "optim.lr: 0.003 -> 0.001" in process.errors
    assert "--override-resume" in process.errors
    assert lab.last_step("r") == 5
    assert "lr = 0.003" in (lab.run("r") / "recipe.toml").read_text()

    # What changes no result needs no override.
    lab.resume(*resume, "--set", "checkpoint.keep=3")
    process = lab.resume("r", "--steps", "7", "--set", "optim.lr=1e-3", "--override-resume")
    assert lab.events("r", "override")[0]["differences"] == [["optim.lr", 0.003, 0.001]]
    assert "lr = 0.001" in (lab.run("r") / "recipe.toml").read_text()
    again = lab.resume("r", "--steps", "9", "--set", "optim.lr=2e-3", code=2)
    assert "0.001 -> 0.002" in again.errors

    # An edited file is a changed recipe too.
    path = lab.run("r") / "recipe.toml"
    whole = path.read_text()
    path.write_text(whole.replace("weight_decay = 0.1", "weight_decay = 0.2"))
    lab.resume(*resume, code=2)


def test_other_text_is_refused_at_resume(lab):
    """F10: the cache is lost, and the text has changed."""
    lab.train("first", "--steps", "0")
    recipe = lab.recipe("fixed", tokenizer=json.dumps(str(lab.run("first") / "tokenizer.json")))
    lab.train("r", "--steps", "2", recipe=recipe)
    text = lab.folder / "text.txt"
    text.write_text(text.read_text()[:100_000])
    another = {"EFFTRAIN_CACHE": str(lab.folder / "cache")}
    # It makes another vocabulary too, unless that is given.
    assert "tokenizer" in lab.resume("first", code=3, **another).errors
    errors = lab.resume("r", "--steps", "3", code=2, **another).errors
    assert "train_hash" in errors and re.search(r"'[0-9a-f]{12}\.\.\.' -> ", errors)
    assert re.search("[0-9a-f]{13}", errors) is None, "hashes are cut short"
    lab.resume("r", "--steps", "3", "--override-resume", **another)
    assert lab.events("r", "override")[0]["differences"][0][0] == "data: train_hash"


def test_a_run_goes_on_without_its_text(lab, tmp_path_factory):
    """F10: changed, deleted, and the run moved to another folder: the tokens are in the cache."""
    lab.train("whole")
    recipe = lab.recipe(train='"text.txt"')
    lab.train("r", "--steps", "5", recipe=recipe)
    origin = json.loads((lab.run("r") / "origin.json").read_text())
    assert origin["folder"] == str(lab.folder)
    text = lab.folder / "text.txt"
    text.write_text("other text\n" * 10_000)
    lab.resume("r", "--steps", "10")
    text.unlink()
    lab.call("grow r --operator depth")
    lab.call("pretrain --from r@10 --name branch --no-probe --steps 11")
    moved = Laboratory(lab.zygote, tmp_path_factory.mktemp("moved"))
    shutil.move(lab.folder / "runs", moved.folder / "runs")
    errors = moved.resume("r", code=3, EFFTRAIN_CACHE=str(moved.folder / "cache")).errors
    assert errors.endswith(f"run 'r' was started in {lab.folder}: give the command there\n")
    moved.resume("r")
    for name, tensor in moved.tensors("whole", 20).items():
        assert torch.equal(moved.tensors("r", 20)[name], tensor)


def test_a_sweep_refuses_a_text_that_has_changed(lab):
    """F10: its later runs would train on other tokens than its earlier ones."""
    recipe = lab.recipe("a")
    sweep = ("sweep", recipe, "--device", "cpu", "--seeds")
    lab.train("a-seed1", "--seed 1", recipe=recipe)
    text = lab.folder / "text.txt"
    first = text.read_text()
    text.write_text(first)  # the same text, at another time
    lab.call(*sweep, "1")
    text.write_text(f"one more line\n{first}")
    errors = lab.call(*sweep, "1,2", code=2).errors
    assert errors.startswith("error: the text has changed since run 'a-seed")
    assert not lab.run("a-seed2").exists()


def test_runs_verify_names_a_damaged_checkpoint(tmp_path):
    path = make_run(tmp_path, "r", steps=(5, 10))
    assert call("runs", "verify", "r")[1].endswith(", 2 checkpoints: no damage\n")
    truncate(path / "checkpoints" / "step-00000010" / "model.safetensors")
    code, said = call("runs", "verify", "r")
    assert code == 3
    assert "step-00000010/model.safetensors" in said and "step-00000005" not in said
