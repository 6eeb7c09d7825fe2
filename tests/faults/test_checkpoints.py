"""Damaged, missing, half-written and malicious checkpoints."""

from __future__ import annotations

import ast
import json
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch

from efftrain_cli.foundation.errors import CheckpointError, UsageError
from efftrain_cli.run.directory import checkpoints_of, new_run
from efftrain_cli.run.manifest import WITHOUT_OPTIMIZER, keep_weights, verify_checkpoint
from efftrain_cli.training.build import build_state
from efftrain_cli.training.checkpoint import load
from efftrain_cli.training.resuming import accepted_differences, new_differences
from tests.damage import flips
from tests.faults.conftest import RECIPE, newest_checkpoint, seal, step_of, truncate
from tests.launch import Laboratory
from tests.tiny import CPU, changed, fresh
from tests.trained_run import write_checkpoint


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


def empty(path: Path) -> None:
    path.write_bytes(b"")


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


@pytest.mark.parametrize("fault", [empty, truncate, Path.unlink])
@pytest.mark.parametrize(
    "file",
    ["model.safetensors", "optimizer.safetensors", "progress.json", "recipe.toml", "manifest.json"],
)
def test_a_file_cut_short_or_missing(run, file, fault, capfd):
    """F12."""
    fault(checkpoints_of(run.path)[-1] / file)
    assert step_of(newest_checkpoint(run)) == 5
    warnings = capfd.readouterr().err.splitlines()
    assert len(warnings) == 1
    assert file in warnings[0]


@pytest.mark.parametrize("fault", [garbage, other_json, older_by_content])
def test_a_manifest_that_is_none(run, fault, capfd):
    """F12."""
    fault(checkpoints_of(run.path)[-1] / "manifest.json")
    assert step_of(newest_checkpoint(run)) == 5
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_a_checkpoint_that_keeps_its_weights_alone(run, capfd):
    """As a race leaves it: fit to be sampled from, not to be resumed."""
    newest = checkpoints_of(run.path)[-1]
    keep_weights(newest)
    assert {path.name for path in newest.iterdir()} == {*WITHOUT_OPTIMIZER, "manifest.json"}
    assert step_of(newest_checkpoint(run)) == 5
    assert "does not list optimizer.safetensors" in capfd.readouterr().err
    assert verify_checkpoint(newest) == WITHOUT_OPTIMIZER


def test_folders_that_are_no_checkpoints(run, capfd):
    """F12: the highest valid step is taken, after a warning of one that is only named like one."""
    for name in ("step-abc", "step-", "notes", "step-15"):
        (run.path / "checkpoints" / name).mkdir()
    (run.path / "checkpoints" / "step-00000020").mkdir()  # named like one, and empty
    assert step_of(newest_checkpoint(run)) == 10
    (warning,) = capfd.readouterr().err.splitlines()
    assert "step-00000020/manifest.json" in warning


def test_no_valid_checkpoint_left(run):
    """F11: exit code 3, every bad file named."""
    for path in checkpoints_of(run.path):
        truncate(path / "optimizer.safetensors")
    with pytest.raises(CheckpointError) as raised:
        newest_checkpoint(run)
    assert raised.value.exit_code == 3
    assert "step-00000005/optimizer.safetensors" in str(raised.value)
    assert "step-00000010/optimizer.safetensors" in str(raised.value)


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path):
    wide = build_state(changed(RECIPE, "model.n_embd=32"), 300, CPU)
    write_checkpoint(tmp_path / "step-00000003", wide)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor .* has shape"):
        load(tmp_path / "step-00000003", fresh(RECIPE, 300), RECIPE)
    deep = build_state(changed(RECIPE, "model.n_layer=3"), 300, CPU)
    write_checkpoint(tmp_path / "step-00000004", deep)
    with pytest.raises(CheckpointError, match=r"tensor h\.2\.\S+ is not part of"):
        load(tmp_path / "step-00000004", fresh(RECIPE, 300), RECIPE)


def test_an_accepted_difference_is_accepted_with_its_values(run):
    """The same key with another value has to be accepted again."""
    first, second = [["optim.lr", 0.003, 0.001]], [["optim.lr", 0.003, 0.002]]
    what = "the recipe has changed"
    path = run.path
    assert new_differences(path, first, True, what) == first
    assert accepted_differences(path) == [], "asking records nothing: the resume may yet be refused"
    run.event("override", {"differences": first})
    assert new_differences(path, first, False, what) == []
    with pytest.raises(UsageError, match=r"optim\.lr: 0\.003 -> 0\.002"):
        new_differences(path, second, False, what)
    assert new_differences(path, second, True, what) == second


def test_the_last_row_of_a_step_is_that_of_its_newest_segment(run):
    """After a stop during the evaluation of the step that was trained anew."""
    run.log(
        [
            {"step": 4, "segment": 0, "loss": 4.0},
            {"step": 5, "segment": 0, "loss": 5.0},
            {"step": 6, "segment": 0, "loss": 6.0},
        ]
    )
    run.log([{"step": 5, "segment": 1, "loss": 5.5}])
    assert run.row_of(5) == {"step": 5, "segment": 1, "loss": 5.5}
    assert run.row_of(6) == {}


def test_segments_follow_the_rows_where_the_events_are_lost(run):
    """F58."""
    run.log([{"step": 1, "segment": 0}, {"step": 2, "segment": 3}])
    (run.path / "events.jsonl").unlink()
    assert run.next_segment() == 4
    assert run.next_segment(after=7) == 8


def test_the_first_segment_is_0(tmp_path):
    with new_run("new", "", {}) as new:
        assert new.next_segment() == 0


class Bomb:
    """Unpickling it creates the canary."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return Path.touch, (self.canary,)


def test_a_malicious_pickle_is_never_run(lab):
    """F14: pickles where checkpoints, tokenizers and shards are read, with manifests that vouch for
    them."""
    canary = lab.folder / "canary"
    bombs = [pickle.dumps(Bomb(canary))]
    torch.save(Bomb(canary), lab.folder / "bomb.pt")
    bombs.append((lab.folder / "bomb.pt").read_bytes())
    pickle.loads(bombs[0])
    assert canary.exists(), "the bomb works"
    canary.unlink()
    recipe = lab.recipe()
    lab.train("r", "--steps", "1", recipe=recipe)
    shutil.copytree(lab.run("r"), lab.folder / "sound")
    for bomb in bombs:
        for file in ("model.safetensors", "optimizer.safetensors", "progress.json", "recipe.toml"):
            shutil.rmtree(lab.run("r"))
            shutil.copytree(lab.folder / "sound", lab.run("r"))
            checkpoint = lab.checkpoint("r", 1)
            (checkpoint / file).write_bytes(bomb)
            seal(checkpoint)
            with pytest.raises(CheckpointError):
                if file == "recipe.toml":
                    _read_recipe(checkpoint)
                else:
                    load(checkpoint, fresh(RECIPE, 300), RECIPE)
    shutil.rmtree(lab.run("r"))
    shutil.copytree(lab.folder / "sound", lab.run("r"))
    (lab.run("r") / "tokenizer.json").write_bytes(bombs[0])
    (lab.folder / "bomb.json").write_bytes(bombs[0])
    for arguments in (
        ("sample", "r", "--prompt", "x"),
        (
            "pretrain",
            "--recipe",
            recipe,
            "--name",
            "s",
            "--set",
            f"data.tokenizer={lab.folder / 'bomb.json'}",
        ),
        ("pretrain", "--recipe", str(lab.folder / "bomb.pt"), "--name", "t"),
    ):
        process = lab.call(*arguments, code=None)
        assert process.code in (2, 3), (arguments, process.errors)
    assert not canary.exists()


def _read_recipe(checkpoint: Path) -> None:
    from efftrain_cli.training.checkpoint import read_recipe

    read_recipe(checkpoint)


def test_no_module_can_unpickle():
    """F14: no name through which Python runs a file's code stands anywhere in the package."""
    package = Path(__file__).resolve().parent.parent.parent / "efftrain_cli"
    forbidden = {"pickle", "cPickle", "dill", "joblib", "cloudpickle", "shelve", "marshal"}
    found = []
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [
                    node.module or "",
                    *(f"{node.module}.{alias.name}" for alias in node.names),
                ]
            elif isinstance(node, ast.Attribute):
                names = [ast.unparse(node)]
            elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                names = [] if ast.unparse(node.value) == "False" else [node.arg]
            for name in names:
                if (
                    name.split(".")[0] in forbidden
                    or name.startswith(("torch.load", "torch.distributed.checkpoint"))
                    or (
                        name
                        in ("read_pickle", "allow_pickle", "pd.read_pickle", "pandas.read_pickle")
                    )
                ):
                    found.append(f"{path.name}:{node.lineno}: {name}")
    assert found == []


def test_a_changed_recipe_is_refused_at_resume(lab):
    """F10."""
    recipe = lab.recipe()
    lab.train("r", "--steps", "5", recipe=recipe)
    resume = ("r", "--steps", "6")

    process = lab.resume(*resume, "--set", "model.n_layer=3", code=3)
    assert "model.n_layer: 2 -> 3" in process.errors

    for change, words in (
        ("optim.lr=1e-3", "optim.lr: 0.003 -> 0.001"),
        ("data.valid_fraction=0.1", "data.valid_fraction"),
    ):
        process = lab.resume(*resume, "--set", change, code=2)
        assert words in process.errors
        assert "--override-resume" in process.errors
    assert lab.last_step("r") == 5
    assert "lr = 0.003" in (lab.run("r") / "recipe.toml").read_text()

    # What changes no result needs no override.
    lab.resume(*resume, "--set", "checkpoint.keep=3")
    process = lab.resume("r", "--steps", "7", "--set", "optim.lr=1e-3", "--override-resume")
    assert lab.events("r", "override")[0]["differences"] == [["optim.lr", 0.003, 0.001]]
    assert "lr = 0.001" in (lab.run("r") / "recipe.toml").read_text()
    lab.resume("r", "--steps", "8")

    # An edited file is a changed recipe too.
    path = lab.run("r") / "recipe.toml"
    whole = path.read_text()
    edited = whole.replace("weight_decay = 0.1", "weight_decay = 0.2")
    path.write_text(edited)
    lab.resume(*resume, code=2)
    path.write_text(whole)


def test_other_text_is_refused_at_resume(lab):
    """F10: the cache is lost, and the text has changed."""
    lab.train("first", "--steps", "0")
    recipe = lab.recipe("fixed", tokenizer=json.dumps(str(lab.run("first") / "tokenizer.json")))
    lab.train("r", "--steps", "2", recipe=recipe)
    lab.train("trained", "--steps", "2")
    text = lab.folder / "text.txt"
    text.write_text(text.read_text()[:100_000])
    another = {"EFFTRAIN_CACHE": str(lab.folder / "cache")}
    # It makes another vocabulary too, unless that is given.
    assert "tokenizer" in lab.resume("trained", code=3, **another).errors
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
    lab.resume("r", "--steps", "15")
    lab.call("grow r --operator depth")
    lab.call("pretrain --from r@15 --name branch --no-probe --steps 16")
    moved = Laboratory(lab.zygote, tmp_path_factory.mktemp("moved"))
    shutil.move(lab.folder / "runs", moved.folder / "runs")
    errors = moved.resume("r", code=3, EFFTRAIN_CACHE=str(moved.folder / "cache")).errors
    assert errors.endswith(f"run 'r' was started in {lab.folder}: give the command there\n")
    moved.resume("r")
    for row in (rows := moved.rows("r")):
        if row["step"] in (5, 10, 15):
            row["val_loss"] = None
    whole = [
        row | {"val_loss": None} if row["step"] in (5, 10, 15) else row
        for row in moved.rows("whole")
    ]
    assert rows == whole
    for name, tensor in moved.tensors("whole", 20).items():
        assert torch.equal(moved.tensors("r", 20)[name], tensor)


def test_a_sweep_refuses_a_text_that_has_changed(lab):
    """F10: its later runs would train on other tokens than its earlier ones."""
    sweep = ("sweep", lab.recipe("a"), "--device", "cpu", "--seeds")
    lab.call(*sweep, "1")
    text = lab.folder / "text.txt"
    first = text.read_text()
    text.write_text(first)  # the same text, at another time
    lab.call(*sweep, "1,2")
    text.write_text(f"one more line\n{first}")
    errors = lab.call(*sweep, "1..3", code=2).errors
    assert errors.startswith("error: the text has changed since run 'a-seed")
    assert sorted(
        path.name for path in (lab.folder / "runs").iterdir() if path.name.startswith("a-")
    ) == ["a-seed1", "a-seed2"]
    text.unlink()
    assert "no such file" in lab.call(*sweep, "1..3", code=3).errors
    assert lab.call(*sweep, "1,2").output, "what is trained needs no text"


def test_checkpoint_commands(lab):
    lab.train("r", "--steps", "10")
    process = lab.call("runs", "checkpoints", "r")
    lines = process.output.splitlines()
    assert [line.split()[0] for line in lines] == ["step-00000005", "step-00000010"]
    assert max(map(len, lines)) < 60
    assert lab.call("runs", "verify", "r").output.endswith(", 2 checkpoints: no damage\n")
    truncate(lab.checkpoint("r", 10) / "model.safetensors")
    errors = lab.call("runs", "verify", "r", code=3).errors
    assert "step-00000010/model.safetensors" in errors and "step-00000005" not in errors
    # The run itself goes on from the sound one, and ends.
    process = lab.resume()
    assert "step-00000010/model.safetensors is damaged" in process.errors
    assert "step-00000010.corrupt" in lab.checkpoints("r")
