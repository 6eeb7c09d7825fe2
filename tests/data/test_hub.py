"""Text of the Hugging Face Hub, as far as it is needed: faked, cached, lost on the way; and its
tokenizers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from efftrain_cli.data import building, hub
from efftrain_cli.data.documents import Reader, Tally
from efftrain_cli.data.hub import model_folder
from efftrain_cli.data.prepare import limits_of, prepare
from efftrain_cli.data.sources import Source
from efftrain_cli.data.split import Limits
from efftrain_cli.data.tokenizer import load_tokenizer, train_tokenizer
from efftrain_cli.foundation.errors import DataError
from efftrain_cli.recipe.recipe import load_recipe
from efftrain_cli.recipe.sections import Data
from tests.data.book import LINES, write_texts

pytestmark = pytest.mark.usefixtures("cache")


class FakeHub:
    """`datasets` with one dataset of 4 files, whose rows are counted as they are read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import datasets

        self.rows = [{"text": f"{line}{line}{i}"} for i, line in enumerate(LINES)]
        self.read = 0
        self.fails_at: int | None = None
        self.asked: list[Any] = []
        monkeypatch.setattr(hub, "hub_unreachable", lambda: "")
        monkeypatch.setattr(datasets, "load_dataset", self.load)

    def load(self, name: str, config: str | None, *, revision: str | None, streaming: bool) -> Any:
        import datasets

        assert streaming
        self.asked.append((name, config, revision))

        def generate(numbers: list[int]) -> Any:
            for number in numbers:
                for row in self.rows[number * 500 : number * 500 + 500]:
                    self.read += 1
                    if self.read == self.fails_at:
                        raise ConnectionError("the line is dead")
                    yield row

        rows = datasets.IterableDataset.from_generator(
            generate, gen_kwargs={"numbers": [0, 1, 2, 3]}
        )
        return {"train": rows, "extra": rows}


def test_the_hub_is_read_as_far_as_it_is_needed(monkeypatch):
    there = FakeHub(monkeypatch)
    data = Data(
        train="owner/name", tokenizer="bpe:300", valid_fraction=0.05, split="extra", revision="v2"
    )
    limits = Limits(10_000, 1_000)
    corpus = prepare(data, limits=limits)
    longest = 120
    assert 10_000 <= corpus.train.tokens < 10_000 + longest
    assert 1_000 <= corpus.valid.tokens < 1_000 + longest
    assert {*there.asked} == {("owner/name", None, "v2")}
    # Twice the training text: the same validation text, so that runs of other budgets compare.
    longer = prepare(data, limits=Limits(20_000, 1_000))
    assert longer.valid.sha256 == corpus.valid.sha256 and longer.train.tokens >= 20_000
    begin = corpus.train.read([0], 10_000)
    assert (longer.train.read([0], 10_000) == begin).all()
    asked = len(there.asked)
    prepare(data, limits=limits)
    assert len(there.asked) == asked, "the cache has it"
    with pytest.raises(DataError, match="no split 'other'; it has train, extra\n"):
        prepare(replace(data, split="other"), limits=limits)


def test_a_lost_connection_costs_what_was_read_since_the_last_shard(monkeypatch, tmp_path):
    there = FakeHub(monkeypatch)
    monkeypatch.setattr(building, "BATCH", 4000)
    monkeypatch.setattr(building, "SHARD_TOKENS", 5000)
    train_tokenizer(300, LINES).save(tmp_path / "tokenizer.json")
    data = Data(train="owner/name", tokenizer=str(tmp_path / "tokenizer.json"), valid_fraction=0.05)
    limits = Limits(50_000, 1_500)
    expected = prepare(data, limits=limits)
    whole = there.read
    monkeypatch.setenv("EFFTRAIN_CACHE", str(tmp_path / "second"))
    there.read, there.fails_at = 0, whole // 2
    with pytest.raises(
        DataError,
        match=r"after row [\d,]+: ConnectionError: the line is dead\n  the same command continues",
    ):
        prepare(data, limits=limits)
    there.fails_at = None
    corpus = prepare(data, limits=limits)
    assert corpus.data_hash == expected.data_hash
    assert corpus.manifest == expected.manifest
    # `datasets` passes over the rows of the file it was in, but over no file before.
    assert there.read < 1.35 * whole


def test_what_a_recipe_needs_of_the_hub():
    """`small` trains on 2M tokens and validates on 64 windows of 256: the next powers of two, with
    a last target."""

    def limits(*overrides: str) -> Limits:
        return limits_of(load_recipe("small", overrides))

    there = "data.train=owner/name"
    assert limits("data.max_tokens=5M") == (5_000_000, None), "local text is prepared whole"
    assert limits(there) == (1 << 21, 1 << 15)
    # Two windows more than a budget of so many.
    for windows, tokens in ((4094, 1 << 20), (4095, 1 << 21)):
        budget = f"train.tokens={windows * 256}"
        assert limits(there, budget, "train.batch_size=1") == (tokens, 1 << 15)
    assert limits(there, "data.max_tokens=5M", "eval.windows=127") == (5_000_000, 1 << 15)
    assert limits(there, "data.max_tokens=5M", "eval.windows=128") == (5_000_000, 1 << 16)


def texts_of(source: Source) -> list[str]:
    documents = Reader(source, Tally()).documents()
    return ["".join(document.pieces()) for document in documents]


def test_a_cached_dataset_is_read_without_network(tmp_path, monkeypatch):
    """First what `datasets` has prepared, of which it gives the newest copy and no revision; then
    what `hf download` has fetched, three rows laid out as it does."""
    import datasets
    from huggingface_hub import constants

    monkeypatch.setattr(hub, "hub_unreachable", lambda: "no network in this test")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    source = Source("owner/name", "hub", False)
    with pytest.raises(DataError, match=r"no network in this test.*caches have no copy\n  connect"):
        texts_of(source)

    folder = tmp_path / "hub" / "datasets--owner--name"
    snapshot = folder / "snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(snapshot.name)
    write_texts(snapshot / "train.jsonl", ["one", "two", "three"])
    assert texts_of(source) == ["one", "two", "three"]
    with pytest.raises(DataError, match="caches have no copy of revision 'v2'"):
        texts_of(source._replace(revision="v2"))

    load = datasets.load_dataset
    prepared = datasets.DatasetDict(train=datasets.Dataset.from_list([{"text": "prepared"}]))
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda *words, **options: load(*words, **options) if options else prepared,
    )
    assert texts_of(source) == ["prepared"]
    assert texts_of(source._replace(revision="main")) == ["one", "two", "three"]


def test_any_tokenizer_of_the_hub_by_name(tmp_path, monkeypatch):
    own = train_tokenizer(300, LINES)
    own.save(tmp_path / "tokenizer.json")

    def hub_file(repository: str, name: str, revision: str | None = None) -> Path:
        assert (repository, revision) == ("owner/name", "v1")
        return tmp_path / name

    monkeypatch.setattr(hub, "hub_file", hub_file)
    assert load_tokenizer("owner/name@v1").sha256 == own.sha256


def test_without_network_the_hub_is_given_up_quickly(monkeypatch, tmp_path):
    """A host that never answers: 1 s of probing, then the way out."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://192.0.2.1")  # reserved, answers nowhere
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "getproxies", dict)

    def never_answers(address: tuple[str, int], timeout: float) -> None:
        assert timeout == 1.0
        raise TimeoutError

    monkeypatch.setattr("efftrain_cli.data.hub.socket.create_connection", never_answers)
    with pytest.raises(DataError, match=r"192\.0\.2\.1:80 does not answer.*\n.*bpe:N"):
        load_tokenizer("gpt2")
    monkeypatch.setattr(constants, "ENDPOINT", "https://192.0.2.1")
    with pytest.raises(DataError, match=r"owner/name cannot be downloaded: 192\.0\.2\.1:443 does"):
        model_folder("owner/name")
    with pytest.raises(DataError, match=r"neither a file nor a folder here, .* have no copy\n"):
        texts_of(Source("owner/name", "hub", False))


def test_a_dataset_in_the_hubs_layout_streams_through_datasets(tmp_path):
    """Two splits as files of a local folder: what a download from the Hub looks like to
    `datasets`."""
    for split, rows in (("train", ["one", "", "two"]), ("validation", ["three"])):
        write_texts(tmp_path / f"{split}.jsonl", rows)
    train = Source(str(tmp_path), "hub", False)
    assert texts_of(train) == ["one", "two"]
    assert texts_of(train._replace(validates=True)) == ["three"]
    with pytest.raises(DataError, match=r"no field 'body'; it has 'text'"):
        texts_of(train._replace(text_field="body"))
    (tmp_path / "train.jsonl").write_text("{")
    with pytest.raises(DataError, match="after row 0"):
        texts_of(train)
