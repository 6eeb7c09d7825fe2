"""A message's advice works: for each refusal that names a command, an option, a key or a variable,
the advice is followed on the failing input."""

from __future__ import annotations

import ast
import contextlib
import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from efftrain_cli.foundation.errors import DataError, DiskError, EfftrainError, UsageError
from efftrain_cli.recipe.check import known_keys
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.training import dist
from efftrain_cli.training.launch import refuse_several
from efftrain_cli.training.session import choose_device
from efftrain_cli.trials.runner import TrialRunner
from tests.conftest import REPOSITORY, cli
from tests.fake_runs import write_jsonl, write_run
from tests.study.fake import Fake, recipes
from tests.tiny import changed, fresh, tiny_recipe
from tests.trained_run import TEXT
from tests.tune_warmup.search import train_here

KINDS = {"DataError", "UsageError", "DiskError", "DamagedError"}
SECTIONS = "|".join(key.partition(".")[0] for key in known_keys(Recipe))
ADVICE = re.compile(
    r"--[a-z]|efftrain [a-z]|EFFTRAIN_|[A-Z]+_[A-Z]{3,}|ulimit|iconv"
    rf"|\b(?:{SECTIONS})\.[a-z_]"
)
"""What a message advises by name."""
TINY = (
    "--set model.n_layer=1 --set model.n_embd=16 --set model.n_head=2 --set model.seq_len=32"
    " --set data.tokenizer=bpe:300 --set data.valid_fraction=0.3 --set data.repeat=true"
    " --set train.tokens=2000 --set train.batch_size=8 --set optim.warmup_steps=2"
    " --set eval.windows=4"
)
PREPARE = f"prepare --recipe small {TINY} --set data.train="
TRAIN = f"pretrain --recipe small {TINY} --no-probe --set train.compile=off --set data.train=my.txt"
Change = Callable[[pytest.MonkeyPatch], object]


def nothing(patch: pytest.MonkeyPatch) -> None:
    """Leave everything as it is."""


class Row(NamedTuple):
    """A refusal, and its advice followed."""

    words: str
    """Of the message's source, {} for a value: they are in no other message."""
    fails: str
    advice: str
    mended: str
    make: Change = nothing
    mend: Change = nothing


def fake_runs(*names: str, steps: int = 100) -> Change:
    return lambda patch: [
        write_run(Path("runs"), n, seed, steps=steps) for n in names for seed in (1, 2)
    ]


def file(name: str, content: str = TEXT) -> Change:
    def write(patch: pytest.MonkeyPatch) -> None:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(content)

    return write


def both(*changes: Change) -> Change:
    return lambda patch: [change(patch) for change in changes]


def variable(name: str, value: str | None) -> Change:
    def change(patch: pytest.MonkeyPatch) -> None:
        if value is None:
            patch.delenv(name)
        else:
            patch.setenv(name, value)

    return change


def damage_shard(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("EFFTRAIN_CACHE", "cache")
    cli(f"{PREPARE}my.txt")
    (shard,) = Path("cache").rglob("valid*.bin")
    os.truncate(shard, 2)


def remove_corpus(patch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(Path("cache"))


def texts(name: str, bad: int, of: int) -> Change:
    """Write JSON lines of which some have no text."""

    def write(patch: pytest.MonkeyPatch) -> None:
        lines = [json.dumps({"text": f"{TEXT[n % 400 :][:300]} {n}"}) for n in range(of)]
        lines[5 : 5 + bad] = ["{"] * bad
        Path(name).write_text("\n".join(lines) + "\n")

    return write


def table(column: str) -> Change:
    lines = [f"arm,seed,step,{column}"]
    lines += [f"{arm},{seed},1,{4 + seed / 100}" for arm in "ab" for seed in range(3)]
    return file("runs.csv", "\n".join(lines) + "\n")


@cache
def trained_once() -> Path:
    """Train a run in a folder of its own."""
    folder = Path(tempfile.mkdtemp(dir=Path.cwd().parent))
    with contextlib.chdir(folder):
        Path("my.txt").write_text(TEXT)
        cli(f"{TRAIN} --name r", env={"EFFTRAIN_RUNS": "runs"})
    return folder / "runs"


def trained(patch: pytest.MonkeyPatch) -> None:
    """Copy the run that every row shares."""
    shutil.copytree(trained_once(), "runs")


def broken_compiler(patch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    patch.setattr("efftrain_cli.training.compiling.BACKEND", fail)


def damage_lines(patch: pytest.MonkeyPatch) -> None:
    fake_runs("a")(patch)
    path = Path("runs/a-seed1/metrics.jsonl")
    lines = path.read_text().splitlines()
    lines[20] = lines[50] = "{broken"
    path.write_text("".join(f"{line}\n" for line in lines))


def remove_listed_lines(patch: pytest.MonkeyPatch) -> None:
    """Remove the lines that `efftrain runs verify` lists."""
    with pytest.raises(DataError) as error:
        cli("runs verify a-seed1")
    numbers = {
        int(number) for number in re.findall(r"metrics\.jsonl, line (\d+)", str(error.value))
    }
    assert numbers == {21, 51}
    path = Path("runs/a-seed1/metrics.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    kept = [line for number, line in enumerate(lines, 1) if number not in numbers]
    path.write_text("".join(kept))


def long_race(patch: pytest.MonkeyPatch) -> None:
    """Two recipes, a limit that every race exceeds, and runs that cost nothing."""
    recipes(Path(), "a", "b")
    patch.setattr("efftrain_cli.cli.race.LARGE", 0.0)
    runner = Fake(lambda trial: 4 + trial.seed % 7 / 100 + trial.seed % 3 * len(trial.name) / 1000)
    patch.setattr("efftrain_cli.study.conduct.runner_of", lambda *_, **__: runner)


def one_seed_swept(patch: pytest.MonkeyPatch) -> None:
    """Train the first run of a sweep, all of them in this process; change its text."""
    here = partial(TrialRunner, launch=train_here)
    patch.setattr("efftrain_cli.trials.runner.TrialRunner", here)
    cli(f"{SWEEP} 1")
    Path("my.txt").write_text(f"one more line\n{TEXT}")


LADDER = """
seeds = "0..2"
baseline = "small"
set = [{}]
branches = [1, 2]
sizes = "100K..400K x2"
tokens_per_parameter = 100
primary = [{{measure = "compute_multiplier", direction = "better"}}]
arms = [{{name = "small", recipe = "small"}}, {{name = "slw", recipe = "small-slw"}}]
"""
SWEEP = f"sweep small {TINY} --set train.compile=off --set data.train=my.txt --seeds"
ECHO = "race a b --pairs 3 --command 'echo loss: 4.{seed}; : {arm}'"
BRANCH = "pretrain --no-probe --name b --from"
H100 = '--assume "H100 x {} at 40%"'
ROWS = [
    Row("compare needs runs or recipes", "compare", "efftrain runs list", "runs list"),
    Row(
        "--columns names columns of a table",
        "compare a --columns val_loss=bpb",
        "give --from FILE too",
        "compare --columns val_loss=bpb --from runs.csv",
        table("bpb"),
    ),
    Row(
        "has no column {}, only",
        "compare --from runs.csv",
        "--columns val_loss=NAME",
        "compare --from runs.csv --columns val_loss=bpb",
        table("bpb"),
    ),
    Row("no run to grow", "grow", "efftrain runs list", "runs list"),
    Row(
        "no operator to grow with",
        "grow r",
        "--operator width:3 for x 3",
        "grow r --operator width:3",
        trained,
    ),
    Row(
        "--plan grows nothing",
        "grow a-seed1 --plan --operator depth",
        "give it as --small a-seed1",
        "grow --plan --operator depth --small a-seed1",
        fake_runs("a"),
    ),
    Row(
        "--plan needs the curve",
        "grow --plan --operator depth",
        "add --small RUN",
        "grow --plan --operator depth --small a-seed1",
        fake_runs("a"),
    ),
    Row(
        "validation losses are too few",
        "grow --plan --operator depth --small a-seed1",
        "train longer",
        "grow --plan --operator depth --small b-seed1",
        both(fake_runs("a", steps=20), fake_runs("b")),
    ),
    Row(
        "the model, its earlier stages",
        "grow r --operator depth --set model.n_layer=8",
        "--set stages.1.lr",
        "grow r --operator depth --set stages.1.lr=1e-3",
        trained,
    ),
    Row(
        "was grown before in other variants",
        "grow r-grown --operator depth --name more --weights-only",
        "leave out --weights-only",
        "grow r-grown --operator depth --name more",
        both(trained, lambda patch: cli("grow r --operator depth")),
    ),
    Row(
        "was trained on another text than data.train",
        "grow r --operator depth",
        "--set data.train=",
        "grow r --operator depth --set data.train=my.txt",
        both(
            variable("EFFTRAIN_CACHE", "cache"),
            trained,
            file("my.txt", TEXT.replace("Anna", "Otto")),
        ),
    ),
    Row(
        "cannot be shared by",
        f"pretrain small --plan {H100.format(9)} --set train.batch_size=8",
        "assume at most 8",
        f"pretrain small --plan {H100.format(8)} --set train.batch_size=8",
    ),
    Row(
        "only applies to a printed plan",
        "pretrain small --format csv",
        "add --plan",
        "pretrain small --format csv --plan",
    ),
    Row(
        "--plan is not of the devices here",
        "pretrain small --plan --devices 2",
        '--assume "H100 x 2 at 40%"',
        f"pretrain small --plan {H100.format(2)}",
    ),
    Row(
        "--assume plans for devices that are not here",
        f"pretrain small {H100.format(2)}",
        "add --plan",
        f"pretrain small --plan {H100.format(2)}",
    ),
    Row("no recipe\n  give one", "pretrain", "efftrain recipes list", "recipes list"),
    Row(
        "is a run, not a recipe",
        "pretrain r --plan",
        "runs/r/recipe.toml",
        "pretrain runs/r/recipe.toml --plan",
        trained,
    ),
    Row(
        "only works with --resume",
        "pretrain small --plan --from-start",
        "leave it out",
        "pretrain small --plan",
    ),
    Row(
        "belong to --command",
        "race small small-slw --maximize --plan",
        "give --command too",
        "race a b --maximize --plan --command 'echo {seed} {arm}'",
    ),
    Row(
        "has one value",
        "race small small-slw --plan --tune optim.lr=1e-3",
        "use --set optim.lr=1e-3",
        "race small small-slw --plan --set optim.lr=1e-3",
    ),
    Row(
        "nothing was removed",
        "runs rm r",
        "give --yes",
        "runs rm r --yes",
        trained,
    ),
    Row(
        "these losses do not compare",
        "compare a b",
        "pass --allow",
        "compare a b --allow",
        both(
            fake_runs("a"),
            lambda patch: [
                write_run(Path("runs"), "b", seed, data={"valid_hash": "e" * 64}) for seed in (1, 2)
            ],
        ),
    ),
    Row(
        "is word for word in the validation text",
        f"{PREPARE}my.txt --set data.valid=my.txt",
        "data.allow_overlap = true",
        f"{PREPARE}my.txt --set data.valid=my.txt --set data.allow_overlap=true",
    ),
    Row(
        "{}: {}\n  delete {} and run",
        f"{PREPARE}my.txt",
        "run `efftrain prepare` again",
        f"{PREPARE}my.txt",
        damage_shard,
        remove_corpus,
    ),
    Row(
        "repair or remove it; of 1,000 documents",
        f"{PREPARE}few.jsonl",
        "repair or remove it",
        f"{PREPARE}few.jsonl",
        texts("few.jsonl", 1, 90),
        texts("few.jsonl", 0, 90),
    ),
    Row(
        "repair or remove it; of 1,000 documents",
        f"{PREPARE}many.jsonl",
        'data.on_bad_document = "skip"',
        f"{PREPARE}many.jsonl --set data.on_bad_document=skip",
        texts("many.jsonl", 1, 1000),
    ),
    Row(
        "no field {}; it has",
        f"{PREPARE}a.jsonl",
        "--set data.text_field=FIELD",
        f"{PREPARE}a.jsonl --set data.text_field=body",
        lambda patch: write_jsonl(Path("a.jsonl"), [{"body": TEXT[n:]} for n in range(60)]),
    ),
    Row(
        "cannot be made: {}",
        f"{PREPARE}my.txt",
        "set EFFTRAIN_CACHE to a writable folder",
        f"{PREPARE}my.txt",
        variable("EFFTRAIN_CACHE", "my.txt/cache"),
        variable("EFFTRAIN_CACHE", "cache"),
    ),
    Row(
        "would be read as one text",
        f"{PREPARE}texts",
        'data.train = "texts/train" and data.valid = "texts/valid"',
        f"{PREPARE}texts/train --set data.valid=texts/valid",
        both(file("texts/train/a.txt"), file("texts/valid/b.txt", TEXT.replace("a", "o"))),
    ),
    Row(
        "the validation text has {} tokens",
        f"{TRAIN} --set model.seq_len=512 --set train.batch_size=2 --set data.valid_fraction=0.02",
        "lower model.seq_len",
        f"{TRAIN} --set train.batch_size=2 --set data.valid_fraction=0.02",
    ),
    Row(
        "too few for windows",
        f"{TRAIN} --set data.valid=valid.txt --set model.seq_len=8192 --set train.tokens=100_000",
        "a smaller model.seq_len",
        f"{TRAIN} --set data.valid=valid.txt --set model.seq_len=32",
        file("valid.txt", TEXT.replace("a", "o") * 4),
    ),
    Row(
        "hold no model",
        "recipes new m --parameters 2K",
        "give --parameters 19696",
        "recipes new m --parameters 19696",
    ),
    Row(
        "exists already in {}",
        f"{TRAIN} --name r",
        "for example r-2",
        f"{TRAIN} --name r-2",
        trained,
    ),
    Row(
        "leave --devices out",
        f"{TRAIN} --devices 2",
        "leave --devices out",
        TRAIN,
        both(variable("WORLD_SIZE", "4"), variable("RANK", "0")),
        both(variable("WORLD_SIZE", None), variable("RANK", None)),
    ),
    Row(
        "since its checkpoint",
        "pretrain --resume r --set train.batch_size=4",
        "give --override-resume",
        "pretrain --resume r --set train.batch_size=4 --override-resume",
        trained,
    ),
    Row(
        "there is no device {}",
        f"{TRAIN} --device cuda:99",
        "give auto, cpu",
        f"{TRAIN} --device cpu",
    ),
    Row(
        "has no {}: its runs would be one run",
        "race a b --plan --command 'python train.py'",
        "--seed {seed} --opt {arm}",
        "race a b --plan --command 'python train.py --seed {seed} --opt {arm}'",
    ),
    Row(
        "there are {} processor threads here",
        f"sweep small --seeds 0 --jobs 999 {TINY} --set data.train=my.txt",
        f"use --jobs {len(os.sched_getaffinity(0))} or fewer",
        f"sweep small --seeds 0 --jobs 1 {TINY} --set data.train=my.txt --plan",
    ),
    Row(
        "would be validated on different text",
        "sweep small wide --seeds 0 --plan",
        "with --set for all of them",
        "sweep small wide --seeds 0 --plan --set model.seq_len=64",
        file("recipes/wide.toml", 'base = "small"\n[model]\nseq_len = 32\n'),
    ),
    Row(
        "names no key and value",
        "sweep small --seeds 0 --plan --set optim.lr",
        "optim.lr=1e-3,2e-3",
        "sweep small --seeds 0 --plan --set optim.lr=1e-3,2e-3",
    ),
    Row(
        "probes last as long as",
        "tune-warmup --recipe small-slw --plan --set optim.warmup_steps=0",
        "--set optim.warmup_steps=100",
        "tune-warmup --recipe small-slw --plan --set optim.warmup_steps=100",
    ),
    Row(
        "of transformers cannot compute",
        "export r --out hf",
        "efftrain sample",
        "sample r --max-tokens 2",
        lambda patch: cli(f"{TRAIN} --name r --set model.qk_norm=true"),
    ),
    Row(
        "too little disk space",
        TRAIN,
        "lower checkpoint.keep (now 3)",
        f"{TRAIN} --set checkpoint.keep=1",
        lambda patch: patch.setattr("efftrain_cli.training.resuming.free_bytes", lambda _: 270_000),
    ),
    Row(
        "its learning rate reaches optim.min_lr",
        "pretrain --resume r --set train.tokens=3000",
        "--set optim.decay_tokens=3_000 --override-resume",
        "pretrain --resume r --set train.tokens=3000 --set optim.decay_tokens=3_000"
        " --override-resume",
        lambda patch: cli(f"{TRAIN} --name r --set optim.min_lr=0"),
    ),
    Row(
        "exists with another recipe",
        "sweep mine --seeds 1",
        "efftrain runs rm mine-seed1",
        "sweep mine --seeds 1 --plan",
        both(fake_runs("mine"), file("recipes/mine.toml", 'base = "small"\n')),
        lambda patch: cli("runs rm mine-seed1 --yes"),
    ),
    Row(
        "no tasks given",
        "eval-zeroshot r",
        "--data-dir DIR; gpt2 needs lambada_openai.jsonl",
        "eval-zeroshot r --data-dir sets",
        both(trained, file("sets/lambada_openai.jsonl", '{"text": "Anna was cold"}\n')),
    ),
    Row(
        "ends there or before",
        f"{BRANCH} r@8",
        "raise train.tokens",
        f"{BRANCH} r@8 --set train.tokens=3000",
        trained,
    ),
    Row(
        "has no checkpoint of step",
        f"{BRANCH} r@7 --set train.tokens=3000",
        "name one of these",
        f"{BRANCH} r@8 --set train.tokens=3000",
        trained,
    ),
    Row(
        "a branch of {} cannot have another tokenizer",
        f"{BRANCH} r@8 --set train.tokens=3000 --set data.tokenizer=bpe:310",
        "--set data.tokenizer=",
        f"{BRANCH} r@8 --set train.tokens=3000 --set data.tokenizer=runs/r/tokenizer.json",
        trained,
    ),
    Row(
        "without text to train on",
        "pretrain --resume hf --steps 1 --no-probe",
        "--set data.train=my.txt --set data.repeat=true",
        "pretrain --resume hf --steps 1 --no-probe --set data.train=my.txt --set data.repeat=true",
        both(trained, lambda patch: [cli("export r --out hf"), cli("import hf")]),
    ),
    Row(
        "no text is left for",
        f"{PREPARE}one.jsonl",
        "name validation text in data.valid",
        f"{PREPARE}one.jsonl --set data.valid=my.txt",
        texts("one.jsonl", 0, 1),
    ),
    Row(
        "budgets branch off one run",
        "study mine.toml --plan",
        "set optim.schedule=wsd and optim.decay_share=0.2",
        "study mine.toml --plan",
        file("mine.toml", LADDER.format("")),
        file("mine.toml", LADDER.format('"optim.schedule=wsd", "optim.decay_share=0.2"')),
    ),
    Row(
        "names one device",
        f"{TRAIN} --device cuda:0,cuda:1",
        "use --devices N",
        f"{TRAIN} --devices 1",
    ),
    Row(
        "{}: no terminal to ask on",
        "race a.toml b.toml",
        "--yes",
        "race a.toml b.toml --yes",
        long_race,
    ),
    Row(
        "no source of its standard library",
        f"{PREPARE}stdlib",
        "data.train files of your own",
        f"{PREPARE}my.txt",
        lambda patch: patch.setattr(
            "efftrain_cli.data.sources.sysconfig",
            SimpleNamespace(get_paths=lambda: {"stdlib": "nowhere"}),
        ),
    ),
    Row(
        "install a C compiler",
        f"{TRAIN} --set train.compile=on",
        'with another --name: --set train.compile="off"',
        f"{TRAIN} --set train.compile=off --name r",
        broken_compiler,
    ),
    Row(
        "lines are not rows",
        "runs show a-seed1",
        "remove those lines: `efftrain runs verify a-seed1` lists them",
        "runs show a-seed1",
        damage_lines,
        remove_listed_lines,
    ),
    Row(
        "and was started as one of several",
        "sweep small --seeds 0 --plan",
        "start it once",
        "sweep small --seeds 0 --plan",
        variable("WORLD_SIZE", "4"),
        variable("WORLD_SIZE", None),
    ),
    Row(
        "printed nothing that matches",
        f"{ECHO} --metric 'accuracy (.*)'",
        "--metric; its last lines:\n    loss: 4.100",
        f"{ECHO} --metric 'loss: (.*)'",
    ),
    Row(
        "the text has changed since run",
        f"{SWEEP} 1,2",
        "restore the text",
        f"{SWEEP} 1,2",
        one_seed_swept,
        file("my.txt"),
    ),
    Row(
        "holds no search",
        "tune-warmup unstable-slw --name a-seed1 --plan",
        "give another --name",
        "tune-warmup unstable-slw --name search --plan",
        fake_runs("a"),
    ),
]


ELSEWHERE = {
    "has no split": "test_the_hub_is_read_as_far_as_it_is_needed",
    "has no fp8 matrix units": "test_fp8_units_that_a_gpu_lacks_are_emulated",
    "takes its own device": "test_each_process_takes_its_own_device",
    "cannot be shared by {} devices": "test_as_many_ranks_as_the_smallest_step_has_sequences",
}
"""Refusals that need a Hub, processes or a GPU -> the test that carries their advice out."""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "my.txt").write_text(TEXT)
    return tmp_path


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.words[:40])
def test_the_advice_works_on_the_failing_input(row, home, monkeypatch):
    row.make(monkeypatch)
    with pytest.raises(EfftrainError) as error:
        refuse_several(row.fails.split()[0])
        cli(row.fails)
    assert error.value.exit_code in (2, 3, 6)
    assert row.advice in str(error.value).partition("\n")[2], str(error.value)
    row.mend(monkeypatch)
    cli(row.mended)


def test_fp8_units_that_a_gpu_lacks_are_emulated(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    section = 'chunked_accumulation={fidelity = "hardware", operands = "fp8_e4m3", forward = {}}'
    recipe = tiny_recipe(section)
    model = fresh(tiny_recipe(), 64).model
    with pytest.raises(UsageError, match=r"\n.*--set chunked_accumulation\.fidelity=blocked"):
        recipe.chunked_accumulation.attach(model, torch.device("cuda"))
    emulated = changed(recipe, "chunked_accumulation.fidelity=blocked")
    emulated.chunked_accumulation.attach(model, torch.device("cuda"))
    assert model.loss_sum(*torch.arange(32).view(2, 1, 16)).isfinite()


def test_each_process_takes_its_own_device(monkeypatch):
    """As local rank 1 of two."""
    monkeypatch.setattr(dist, "world_size", lambda: 2)
    monkeypatch.setattr(dist, "local_rank", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    with pytest.raises(UsageError, match="\nuse --device cuda or cpu"):
        choose_device("cuda:0")
    assert [str(choose_device(name)) for name in ("cuda", "cpu")] == ["cuda:1", "cpu"]


@pytest.mark.parametrize(
    "number, advice",
    [(errno.ENOSPC, "`df -i` shows a lack of inodes"), (errno.EMFILE, "`ulimit -n`")],
)
def test_a_save_without_inodes_or_file_numbers_names_their_limit(home, monkeypatch, number, advice):
    """Fewer checkpoints would not help: there are bytes enough."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number), "step-1")

    monkeypatch.setattr("efftrain_cli.training.checkpoint.write", refuse)
    with pytest.raises(DiskError) as error:
        cli(TRAIN)
    fault, _, fix = str(error.value).partition("\n")
    assert os.strerror(number) in fault and advice in fix


def advising() -> Iterator[str]:
    """Yield the text of each refusal's source that advises something by its name."""
    for path in (REPOSITORY / "efftrain_cli").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id in KINDS and node.args:
                    text = template(node.args[0])
                    _, _, fix = text.partition("\n")
                    # Of an extra the packaging tests know whether it exists.
                    if ADVICE.search(fix) and "pip install" not in fix:
                        yield text


def template(node: ast.expr) -> str:
    """Return the text of a string's source, {} for each value."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(template, node.values))
    if isinstance(node, ast.BinOp):
        return template(node.left) + template(node.right)
    return "{}"


def test_every_advice_is_followed_here_or_elsewhere():
    texts = list(advising())
    followed = {row.words for row in ROWS} | ELSEWHERE.keys()
    assert [text for text in texts if not any(words in text for words in followed)] == []
    assert [words for words in followed if not any(words in text for text in texts)] == []
    sources = [path.read_text() for path in (REPOSITORY / "tests").rglob("test_*.py")]
    for test in ELSEWHERE.values():
        assert any(f"\ndef {test}(" in source for source in sources)
