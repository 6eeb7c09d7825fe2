"""What `[data]` names: files, folders, patterns, the library, datasets of the Hub, and mixes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from efftrain_cli.data.corpus import Part, apportion
from efftrain_cli.data.prepare import prepare
from efftrain_cli.data.sources import Source, find_sources, stdlib_files
from efftrain_cli.data.tokenizer import END_OF_TEXT, load_tokenizer
from efftrain_cli.data.windows import Windows, data_warnings
from efftrain_cli.foundation.errors import DataError, RecipeError
from efftrain_cli.recipe.recipe import dump_recipe, load_recipe
from efftrain_cli.recipe.sections import Data, TextSource
from tests.data.book import LINES, write_texts
from tests.data.test_windows import counting_shards
from tests.fake_runs import write_jsonl

pytestmark = pytest.mark.usefixtures("cache")


def names(folder: Path, *entries: str, **keys: Any) -> list[str]:
    """The files that entries of data.train name, below a folder."""
    found = find_sources(Data(train=entries, **keys))
    return [str(Path(source.name).relative_to(folder)) for source in found.sources]


def write_files(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")


def test_files_folders_and_patterns(tmp_path):
    write_files(tmp_path, "b/2.txt", "b/1.txt", "b/deep/3.jsonl", "b/.hidden/4.txt", "a.txt")
    assert names(tmp_path, "b") == ["b/1.txt", "b/2.txt", "b/deep/3.jsonl"]
    # Each file once.
    assert names(tmp_path, "b/*.txt", "a.txt", "b/1.txt") == ["b/1.txt", "b/2.txt", "a.txt"]
    assert names(tmp_path, "**/*.jsonl") == ["b/deep/3.jsonl"]
    assert names(tmp_path, "b/.hidden") == ["b/.hidden/4.txt"]


def test_a_name_says_how_a_file_is_read(tmp_path):
    kinds = {"a.TXT": "txt", "a.txt.bz2": "txt", "a.json.gz": "jsonl", "a.json": "json"}
    write_files(tmp_path, *kinds)
    for name, kind in kinds.items():
        (source,) = find_sources(Data(train=str(tmp_path / name))).sources
        assert source.kind == kind
        (source,) = find_sources(Data(train=str(tmp_path / name), format="csv")).sources
        assert source.kind == "csv"


def test_what_a_folder_has_besides_is_said(tmp_path):
    """README.md is read if there is nothing else."""
    write_files(tmp_path, "a.txt", "cover.html", "README.md")
    folder = str(tmp_path)
    assert names(tmp_path, folder) == ["a.txt"]
    (note,) = find_sources(Data(train=folder)).notes
    assert note.endswith("2 of 3 files are not read (1 .md, 1 .html)")
    everything = find_sources(Data(train=folder, format="txt"))
    assert len(everything.sources) == 3 and everything.notes == ()
    (tmp_path / "a.txt").unlink()
    assert names(tmp_path, folder) == ["README.md"]
    (tmp_path / "README.md").unlink()
    with pytest.raises(DataError, match=r'no file of a known kind .*, but 1 \.html\n.*"txt" reads'):
        find_sources(Data(train=folder))


def test_a_folder_of_splits_is_not_read_as_one_text(tmp_path):
    corpus = tmp_path / "corpus"
    write_files(corpus, "Train/text.txt", "test/text.txt", "valid/text.txt")
    with pytest.raises(DataError) as caught:
        find_sources(Data(train=str(corpus)))
    fault, fix = str(caught.value).splitlines()
    assert fault.endswith("the folder has valid, test beside train, and would be read as one text")
    assert fix.startswith(f'  set data.train = "{corpus}/Train" and data.valid = "{corpus}/valid"')
    found = find_sources(Data(train=f"{corpus}/Train", valid=f"{corpus}/valid"))
    assert [source.validates for source in found.sources] == [True, False]
    assert len(find_sources(Data(train=f"{corpus}/**/*")).sources) == 3


def test_hub_names():
    (source,) = find_sources(Data(train="owner/name", split="extra", revision="v2")).sources
    assert source == Source("owner/name", "hub", False, revision="v2", split="extra")
    found = find_sources(Data(valid="owner/name/config@abc", split="extra"))
    assert found.sources[0] == Source("owner/name", "hub", True, config="config", revision="abc")
    assert found.has_hub and found.has_valid


def test_everything_that_is_not_there_is_said_at_once(tmp_path):
    (tmp_path / "empty").mkdir()
    write_files(tmp_path, "book.pdf")
    entries = ("missing.txt", "empty", "a[1].txt", "book.pdf", "/no/such/folder", "a.txt, b.txt")
    with pytest.raises(DataError) as refused:
        find_sources(Data(valid=entries))
    lines = str(refused.value).splitlines()
    faults = [line for line in lines if not line.startswith("  ")]
    assert len(faults) == len(lines) / 2 == 6
    assert all(line.startswith("data.valid = ") for line in faults)
    assert lines[1] == '  name files, folders or patterns, a Hub dataset "owner/name", or "stdlib"'
    write_files(tmp_path, *(f"many/x.{letter}" for letter in "abcdefg"))
    with pytest.raises(DataError, match=r"1 \.a, 1 \.b, 1 \.c, 1 \.d, 1 \.e, 1 \.f\b(?!,)"):
        find_sources(Data(train="many"))
    with pytest.raises(DataError, match=r"\n  did you mean book.pdf\?$"):
        find_sources(Data(train="book.txt"))
    assert "no such file" in faults[0] and str(tmp_path) in faults[0]
    assert "nothing" in faults[1] and "matches this pattern" in faults[2] and "1 .pdf" in faults[3]
    assert lines[-1] == """  several are written as a list: --set 'data.train=["a.txt", "b.txt"]'"""


def test_token_files_are_refused(tmp_path):
    """Ids of 4 bytes read as ids of 2 train to a loss of 3.64 instead of 5.14 (of users' cases)."""
    np.arange(100, dtype="<u4").tofile(tmp_path / "ids.bin")
    for path in (tmp_path, tmp_path / "ids.bin"):
        with pytest.raises(DataError, match=r"say neither their width nor .*\n  name the text"):
            find_sources(Data(train=str(path)))


def test_the_library_is_source_without_tests():
    files = stdlib_files()
    assert len(files) > 300
    assert any(name.endswith("/json/decoder.py") for name in files)
    unwanted = r"/(tests?|site-packages|idle_test)/|_sysconfigdata"
    assert not [name for name in files if re.search(unwanted, name)]


# --- several sources ------------------------------------------------------------------------------


def test_a_mix_is_a_function_of_position(tmp_path):
    """Tokens that name their source: every beginning of the stream has each source's share, every
    window of a source comes once per epoch of it, and any position gives the same alone as in a
    long read."""
    whole = counting_shards(tmp_path, 6000)
    whole.parts = (Part("a", 0.7, 3000), Part("b", 0.2, 2000), Part("c", 0.1, 1000))
    windows = Windows(whole, 10, seed=3)
    starts = windows.starts(0, 25_000)
    owner = np.searchsorted([3000, 5000], starts, side="right")
    # (j + 1/2) / n in ten-thousandths: 0.71, 2.14, 2.5 (b), 3.57, 5, 5 (c), 6.43, 7.5 (b).
    assert owner[:8].tolist() == [0, 0, 1, 0, 0, 2, 0, 1]
    shares = ((0.7, 0, 3000), (0.2, 3000, 2000), (0.1, 5000, 1000))
    for part, (weight, base, tokens) in enumerate(shares):
        ahead = np.cumsum(owner == part) - weight * np.arange(1, 25_001)
        assert np.abs(ahead).max() <= 2
        own = starts[owner == part]
        per_epoch = tokens // 10 - 1
        assert (own >= base).all() and (own + 11 <= base + tokens).all()
        for begin in range(0, 3 * per_epoch, per_epoch):
            assert len({*own[begin : begin + per_epoch].tolist()}) == per_epoch
    again = Windows(whole, 10, seed=3)
    for position in (24_321, 10_000, 9_999, 0):
        assert again.starts(position, 1) == starts[position]
    assert windows.epochs(windows.per_epoch) == 1 and windows.per_epoch == 299 * 10_000 // 7000
    with pytest.raises(RecipeError, match=r"\(a 7\.00, b 3\.01, c 3\.02\): .*\n.*data\.repeat"):
        windows.check_budget(2990, Data())
    owners = np.searchsorted([3000, 5000], windows.validation_starts(20), side="right")
    assert np.bincount(owners).tolist() == [14, 4, 2]
    assert apportion([5.0, 3.0, 1.0], 10) == [6, 3, 1], "5.56, 3.33 and 1.11"
    short = counting_shards(tmp_path / "short", 81)
    short.parts = (Part("a", 1.0, 40), Part("b", 1.0, 41))
    assert Windows(short, 64, seed=3).validation_starts(4) == [0], "one window across both"


def test_sources_have_fields_and_weights_of_their_own(tmp_path):
    write_texts(tmp_path / "a.jsonl", LINES[:1000])
    write_jsonl(tmp_path / "b.jsonl", [{"body": line} for line in LINES[1000:]])

    def data(*weights: float, **keys: Any) -> Data:
        sources = (
            TextSource(path=str(tmp_path / "a.jsonl"), weight=weights[0]),
            TextSource(path=str(tmp_path / "b.jsonl"), text_field="body", weight=weights[1]),
        )
        return Data(sources=sources, tokenizer="bpe:300", valid_fraction=0.05, **keys)

    corpus = prepare(data(3.0, 1.0))
    first, second = corpus.train.parts
    assert (first.weight, Path(first.name).name) == (3, "a.jsonl")
    assert (second.weight, Path(second.name).name) == (1, "b.jsonl")
    decode = load_tokenizer(corpus.tokenizer_path).decode
    *documents, rest = decode(corpus.train.ids[first.tokens :].tolist()).split(END_OF_TEXT)
    assert {*documents} < {*LINES[1000:]} and rest == ""
    assert first.tokens + second.tokens == corpus.train.tokens
    assert [part.name for part in corpus.valid.parts] == [first.name, second.name]
    assert prepare(data(1.0, 1.0)).folder == corpus.folder, "weights change no token"
    (tmp_path / "valid.txt").write_text("A text of its own.")
    limited = prepare(data(3.0, 1.0, max_tokens=8000, valid=str(tmp_path / "valid.txt")))
    assert limited.valid.parts == ()
    assert [part.tokens // 100 for part in limited.train.parts] == [60, 20]


def test_sources_in_a_recipe(tmp_path):
    recipe = tmp_path / "mix.toml"
    recipe.write_text(
        'base = "small"\n[[data.sources]]\npath = "stdlib"\nweight = 3\n'
        '[[data.sources]]\npath = "b.csv"\ntext_field = "body"\n'
    )
    loaded = load_recipe(str(recipe), ["data.sources.1.weight=0.5"])
    own = TextSource(path="b.csv", text_field="body", weight=0.5)
    assert loaded.data.sources == (TextSource(path="stdlib", weight=3.0), own)
    assert loaded.data.named_text == "stdlib, b.csv"
    for override, fault in (
        ("data.train=x.txt", r"beside \[\[data\.sources\]\]"),
        ("data.sources.1.weight=0.001", "a weight is at least a thousandth"),
    ):
        with pytest.raises(RecipeError, match=fault):
            load_recipe(str(recipe), [override])
    (tmp_path / "again.toml").write_text(dump_recipe(loaded))
    assert load_recipe(str(tmp_path / "again.toml")) == loaded


# --- what is said ---------------------------------------------------------------------------------


def test_warnings_of_little_text(tmp_path):
    windows = Windows(counting_shards(tmp_path, 1010), 10, seed=0)  # 100 windows
    assert data_warnings(windows, 5000, 8) == []
    (epochs,) = data_warnings(windows, 5100, 8)
    assert epochs.startswith("the run reads the text 51 times")
    for few in (1, 7):
        assert data_warnings(windows, 100, few)[0].startswith(f"validation is on {few} window")
    assert data_warnings(windows, 100, 0) == [], "it is refused"
