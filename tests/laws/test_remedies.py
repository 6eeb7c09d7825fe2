"""A message's advice works: for each refusal that names a command, an option, a key or a variable,
the advice is followed on the failing input."""

from __future__ import annotations

import ast
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from efftrain_cli.foundation.errors import DiskError, EfftrainError
from tests.conftest import REPOSITORY, cli
from tests.fake_runs import write_jsonl, write_run
from tests.trained_run import TEXT

KINDS = {"DataError", "UsageError", "DiskError", "DamagedError"}
ADVICE = re.compile(
    r"--[a-z]|efftrain [a-z]|EFFTRAIN_|[A-Z]+_[A-Z]{3,}|ulimit|iconv"
    r"|\b(?:model|data|optim|train|eval|checkpoint|ouroboros|stages|staged_growth)\.[a-z_]"
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


def trained(patch: pytest.MonkeyPatch) -> None:
    cli(f"{TRAIN} --name r")


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
            remove_corpus,
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
        "name runs, their recipes or globs",
        "compare nobody",
        "efftrain runs list",
        "runs list",
    ),
    Row("matches {}", "runs rm nobody", "efftrain runs list", "runs list"),
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
]


ELSEWHERE = {
    "no terminal to ask on": "study/test_race.py",
    "has no split": "data/test_hub.py",
    "no source of its standard library": "data/test_sources.py",
    "has no fp8 matrix units": "methods/test_chunked_accumulation.py",
    "install a C compiler": "training/test_compiling.py",
    "lines are not rows": "run/test_rows.py",
    "and was started as one of several": "training/test_dist.py",
    "takes its own device": "training/test_dist.py",
    "cannot be shared by {} devices": "faults/test_ranks.py",
    "printed nothing that matches": "trials/test_command.py",
    "the text has changed since run": "faults/test_checkpoints.py",
    "holds no search": "tune_warmup/test_tune_warmup.py",
}
"""Refusals that need processes, another Python or another device, and the tests that meet them."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text(TEXT)
    return tmp_path


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.words[:40])
def test_the_advice_works_on_the_failing_input(row, home, monkeypatch):
    row.make(monkeypatch)
    with pytest.raises(EfftrainError) as error:
        cli(row.fails)
    assert error.value.exit_code in (2, 3, 6)
    assert row.advice in str(error.value).partition("\n")[2], str(error.value)
    row.mend(monkeypatch)
    cli(row.mended)


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
    assert all((REPOSITORY / "tests" / file).exists() for file in ELSEWHERE.values())
