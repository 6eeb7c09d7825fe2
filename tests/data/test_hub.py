"""Text of the Hugging Face Hub, as far as it is needed: faked, cached, lost on the way; and its
tokenizers."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from efftrain_cli.data import building, hub
from efftrain_cli.data.hub import HubReader
from efftrain_cli.data.prepare import limits_of, prepare
from efftrain_cli.data.split import NO_LIMITS, Limits
from efftrain_cli.data.text import BadDocuments, HubDataset
from efftrain_cli.data.tokenizer import END_OF_TEXT, load_tokenizer, train_tokenizer
from efftrain_cli.foundation.errors import DataError, DiskError
from efftrain_cli.recipe.recipe import load_recipe
from efftrain_cli.recipe.sections import Data
from tests.data.conftest import LINES, write_texts
from tests.fake_runs import write_jsonl

pytestmark = pytest.mark.usefixtures("cache")


# --- going on -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_prepare_goes_on_where_it_was_stopped(tmp_path, monkeypatch, kind):
    """Stopped at every third batch in turn; in the end the bytes are those of one go, and no batch
    was encoded twice in vain but the few since the last whole shard."""
    if kind == "txt":
        for number in range(19):
            (tmp_path / f"{number:02}.txt").write_text(
                "".join(LINES[number * 100 : number * 100 + 100])
            )
    else:
        lines = [json.dumps({"text": line}) + "\n" for line in LINES]
        (tmp_path / "a.jsonl").write_text("".join(lines[:700]) + "{broken\n" + "".join(lines[700:]))
    data = Data(
        train=f"{tmp_path}/*.{kind}",
        tokenizer="bpe:300",
        valid_fraction=0.05,
        on_bad_document="skip",
    )
    monkeypatch.setattr(building, "_BATCH", 4000)
    monkeypatch.setattr("efftrain_cli.data.corpus.SHARD_TOKENS", 2000)
    expected = prepare(data)
    assert len(expected.train.shards) > 5
    names = sorted(path.name for path in expected.folder.iterdir())
    contents = [path.read_bytes() for path in sorted(expected.folder.iterdir())]
    monkeypatch.setenv("EFFTRAIN_CACHE", str(tmp_path / "second"))
    flush = building.Building._flush
    calls: list[int] = []
    shown = io.StringIO()

    def stops(self: building.Building, batch: list[Any]) -> None:
        calls.append(len(batch))
        if len(calls) % 3 == 0:
            raise KeyboardInterrupt
        flush(self, batch)

    monkeypatch.setattr(building.Building, "_flush", stops)
    starts = 0
    while True:
        starts += 1
        assert starts < 200
        try:
            corpus = prepare(data, console=Console(file=shown))
            break
        except KeyboardInterrupt:
            pass
    assert starts > 5 and "going on after" in shown.getvalue()
    assert sorted(path.name for path in corpus.folder.iterdir()) == names
    assert [path.read_bytes() for path in sorted(corpus.folder.iterdir())] == contents


def test_a_damaged_place_is_not_gone_on_from(tmp_path, monkeypatch, cache):
    write_texts(tmp_path / "a.jsonl")
    data = Data(train=str(tmp_path / "a.jsonl"), tokenizer="bpe:300")
    monkeypatch.setattr(building, "_BATCH", 4000)
    monkeypatch.setattr("efftrain_cli.data.corpus.SHARD_TOKENS", 3000)
    flush, calls = building.Building._flush, iter(range(1000))

    def stops(self: building.Building, batch: list[Any]) -> None:
        if next(calls) == 12:
            raise KeyboardInterrupt
        flush(self, batch)

    monkeypatch.setattr(building.Building, "_flush", stops)
    with pytest.raises(KeyboardInterrupt):
        prepare(data)
    (place,) = (cache / "corpora").glob("*.partial/progress.json")
    place.write_text(place.read_text().replace('"taken": ', '"taken": 1'))
    shown = io.StringIO()
    corpus = prepare(data, console=Console(file=shown, soft_wrap=True))
    assert "starting again" in shown.getvalue()
    assert corpus.train.documents + corpus.valid.documents == 2000


def test_too_little_room_is_said_before_it_is_used(tmp_path, monkeypatch):
    import shutil

    write_texts(tmp_path / "a.jsonl")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10_000))
    with pytest.raises(
        DiskError,
        match=r"(?s)too little room: about [\d,]+ bytes needed, 10,000 bytes free.*EFFTRAIN_CACHE",
    ):
        prepare(Data(train=str(tmp_path / "a.jsonl"), tokenizer="bpe:300"))


# --- the Hub, faked -------------------------------------------------------------------------------


class FakeHub:
    """`datasets` with one dataset of 4 files, whose rows are counted as they are read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import datasets

        self.rows = [{"text": f"{line}{line}{i}"} for i, line in enumerate(LINES * 3)]
        self.read = 0
        self.fails_at: int | None = None
        self.asked: list[Any] = []
        monkeypatch.setattr(hub, "hub_unreachable", lambda: None)
        monkeypatch.setattr(
            datasets, "get_dataset_split_names", lambda *args, **kwargs: ["train", "validation"]
        )
        monkeypatch.setattr(datasets, "load_dataset", self.load)

    def load(
        self, name: str, config: str | None, *, split: str, revision: str | None, streaming: bool
    ) -> Any:
        import datasets

        assert streaming
        self.asked.append((name, config, split, revision))

        def generate(numbers: list[int]) -> Any:
            for number in numbers:
                for row in self.rows[number * 1500 : number * 1500 + 1500]:
                    self.read += 1
                    if self.read == self.fails_at:
                        raise ConnectionError("the line is dead")
                    yield row

        return datasets.IterableDataset.from_generator(
            generate, gen_kwargs={"numbers": [0, 1, 2, 3]}
        )


def test_the_hub_is_read_as_far_as_it_is_needed(monkeypatch):
    there = FakeHub(monkeypatch)
    data = Data(
        train="owner/name", tokenizer="bpe:300", valid_fraction=0.05, split="extra", revision="v2"
    )
    corpus = prepare(data, limits=Limits(20_000, 2_000))
    longest = 120
    assert (
        20_000 <= corpus.train.tokens < 20_000 + longest
        and 2_000 <= corpus.valid.tokens < 2_000 + longest
    )
    assert set(there.asked) == {("owner/name", None, "extra", "v2")}
    assert corpus.manifest["limits"] == {"train": 20_000, "valid": 2_000}
    # Twice the training text: the same validation text, so that runs of other budgets compare.
    longer = prepare(data, limits=Limits(40_000, 2_000))
    assert longer.valid.sha256 == corpus.valid.sha256 and longer.train.tokens >= 40_000
    begin = corpus.train.read([0], 20_000)
    assert (longer.train.read([0], 20_000) == begin).all()
    asked = len(there.asked)
    prepare(data, limits=Limits(20_000, 2_000))
    assert len(there.asked) == asked  # the cache has it


def test_a_lost_connection_costs_what_was_read_since_the_last_shard(monkeypatch, tmp_path):
    there = FakeHub(monkeypatch)
    monkeypatch.setattr(building, "_BATCH", 4000)
    monkeypatch.setattr("efftrain_cli.data.corpus.SHARD_TOKENS", 5000)
    train_tokenizer(300, LINES).save(tmp_path / "tokenizer.json")
    data = Data(train="owner/name", tokenizer=str(tmp_path / "tokenizer.json"), valid_fraction=0.05)
    limits = Limits(150_000, 5_000)
    expected = prepare(data, limits=limits)
    whole = there.read
    monkeypatch.setenv("EFFTRAIN_CACHE", str(tmp_path / "second"))
    there.read, there.fails_at = 0, whole // 2
    with pytest.raises(
        DataError, match=r"(?s)after [\d,]+ rows: ConnectionError.*goes on where this one stopped"
    ):
        prepare(data, limits=limits)
    there.fails_at = None
    corpus = prepare(data, limits=limits)
    assert corpus.data_hash == expected.data_hash
    assert (
        corpus.manifest["train"] == expected.manifest["train"]
        and corpus.manifest["overlap"] == expected.manifest["overlap"]
    )
    # `datasets` passes over the rows of the file it was in, but over no file before.
    assert there.read < 1.35 * whole


def test_what_a_recipe_needs_of_the_hub():
    def limits(*overrides: str) -> Limits:
        return limits_of(load_recipe("small", ["data.train=owner/name", *overrides]))

    recipe = load_recipe("small")
    assert limits_of(recipe) == NO_LIMITS  # local text is prepared whole
    assert (
        limits_of(load_recipe("small", ["data.max_tokens=5M"])) == NO_LIMITS
    )  # `prepare` looks itself
    first = limits()
    assert first is not None and recipe.train.tokens < first.train < 4 * recipe.train.tokens
    assert first.train.bit_count() == first.valid.bit_count() == 1
    assert first.valid > recipe.eval.windows * recipe.model.seq_len
    assert limits("train.tokens=100M").valid == first.valid
    assert limits("data.max_tokens=5M") == (5_000_000, first.valid)


def texts_of(revision: str | None) -> list[str]:
    """The training text of owner/name at a revision, without network."""
    source = HubDataset("owner/name", None, revision, "train")
    documents = HubReader(source, "text", BadDocuments("error")).documents()
    return [document.text for document in documents]


@pytest.mark.parametrize("windows, tokens", [(1022, 65_536), (1023, 131_072)])
def test_two_windows_more_than_the_budget_are_prepared(windows, tokens):
    """1,024 windows of 64 tokens are 2^16 tokens; one more needs the next power of two. 16 x 64 + 1
    tokens validate."""
    budget = ["train.batch_size=1", "eval.windows=16", f"train.tokens={64 * windows}"]
    recipe = load_recipe("small", ["data.train=owner/name", "model.seq_len=64", *budget])
    assert limits_of(recipe) == (tokens, 2048)


@pytest.fixture
def no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub does not answer, and its libraries' caches are empty folders."""
    import datasets
    from huggingface_hub import constants

    monkeypatch.setattr(hub, "hub_unreachable", lambda: "no network in this test")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def write_prepared_copy(tmp_path: Path) -> None:
    """Write ten rows of owner/name into `datasets`' cache, laid out as it lays one out."""
    import datasets

    write_jsonl(tmp_path / "made.jsonl", [{"text": f"row {i}"} for i in range(10)])
    builder = datasets.load_dataset_builder(
        "json", data_files=str(tmp_path / "made.jsonl"), cache_dir=str(tmp_path / "made")
    )
    builder.download_and_prepare()
    (folder,) = (path.parent for path in (tmp_path / "made").rglob("dataset_info.json"))
    target = tmp_path / "datasets" / "owner___name" / "default" / "0.0.0" / "abc"
    target.parent.mkdir(parents=True)
    folder.rename(target)
    for arrow in target.glob("json-*.arrow"):
        arrow.rename(target / arrow.name.replace("json-", "name-"))
    info = json.loads((target / "dataset_info.json").read_text())
    (target / "dataset_info.json").write_text(json.dumps({**info, "dataset_name": "name"}))


def write_downloaded_copy(tmp_path: Path, revision: str) -> None:
    """Write three rows into the Hub's cache, as `hf download --revision` lays them out."""
    folder = tmp_path / "hub" / "datasets--owner--name"
    commit = "c" * 40
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / revision).write_text(commit)
    (folder / "snapshots" / commit).mkdir(parents=True)
    rows = [{"text": f"downloaded {i}"} for i in range(3)]
    write_jsonl(folder / "snapshots" / commit / "train.jsonl", rows)


@pytest.mark.usefixtures("no_network")
def test_a_cached_dataset_is_read_without_network(tmp_path):
    with pytest.raises(DataError, match=r"no network in this test.*caches have no copy\n  connect"):
        texts_of(None)
    write_downloaded_copy(tmp_path, "main")
    assert texts_of(None) == [f"downloaded {i}" for i in range(3)]
    write_prepared_copy(tmp_path)
    assert texts_of(None) == [f"row {i}" for i in range(10)]


def test_the_libraries_are_kept_from_the_hub_for_a_while():
    import datasets
    from huggingface_hub import constants

    before = (datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE)
    with hub.hub_off():
        assert datasets.config.HF_HUB_OFFLINE and constants.HF_HUB_OFFLINE
    assert before == (datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE)


@pytest.mark.usefixtures("no_network")
def test_another_revision_is_never_read_without_network(tmp_path):
    """`datasets` gives the copy that it has prepared last, whatever revision it is asked for."""
    write_prepared_copy(tmp_path)
    with pytest.raises(DataError, match="caches have no copy of revision 'v2'"):
        texts_of("v2")
    write_downloaded_copy(tmp_path, "v2")
    assert texts_of("v2") == [f"downloaded {i}" for i in range(3)]


def test_any_tokenizer_of_the_hub_by_name(tmp_path, monkeypatch):
    asked = []
    own = train_tokenizer(300, LINES)
    own.save(tmp_path / "tokenizer.json")
    renamed = (tmp_path / "tokenizer.json").read_text().replace(END_OF_TEXT, "[END]")
    (tmp_path / "tokenizer.json").write_text(renamed)

    def hub_file(repository: str, name: str, revision: str | None = None) -> Path:
        asked.append((repository, name, revision))
        return tmp_path / name

    monkeypatch.setattr(hub, "hub_file", hub_file)
    with pytest.raises(DataError, match=r"no end-of-text token.*tokenizer_config\.json"):
        load_tokenizer("owner/name@v1")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "[END]"}}))
    loaded = load_tokenizer("owner/name@v1")
    assert asked[0] == ("owner/name", "tokenizer.json", "v1")
    assert (loaded.eot_id, loaded.vocab_size) == (own.eot_id, 300)
    assert loaded.encode(["fox"])[0].tolist() == own.encode(["fox"])[0].tolist()
