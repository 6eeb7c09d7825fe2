"""Our model in lm-evaluation-harness against the harness's own HFLM on the exported model: same
items, same scores."""

from __future__ import annotations

import math
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trained_run import make_run

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("transformers")

from lm_eval.api.metrics import mean, perplexity  # noqa: E402

from efftrain_cli.model.hf import write_hf  # noqa: E402
from efftrain_cli.training.loading import TrainedModel, load_trained_model  # noqa: E402
from efftrain_cli.zeroshot.model import HarnessModel  # noqa: E402
from efftrain_cli.zeroshot.score import _stderr, score_task  # noqa: E402
from efftrain_cli.zeroshot.tasks import TASKS, find_specs, load_tasks  # noqa: E402
from tests.fake_runs import write_jsonl  # noqa: E402

SENTENCE = (
    "Anna found the lantern near the harbour and then walked home again, because it was cold."
)
MADE: dict[str, list[dict[str, Any]]] = {
    "lambada_openai.jsonl": [
        {"text": f"{SENTENCE} Then came {name}"} for name in ("Anna", "nobody", "the captain", "it")
    ],
    "wikitext2_test_pages.jsonl": [
        {"page": f" = Title {n} = \n \n {SENTENCE * n} \n \n"} for n in (1, 3, 9)
    ],
    "hellaswag.jsonl": [
        {
            "query": f"Evening: {who} walks home. {who}",
            "choices": ["is cold.", "paints a ship.", "lost", "found a letter again."],
            "gold": n,
        }
        for n, who in enumerate(("Anna", "He", "My brother"))
    ],
    "piqa.jsonl": [
        {"goal": "Walk home", "sol1": "at night", "sol2": "in the ship ", "label": n % 2}
        for n in range(3)
    ],
    "winogrande.jsonl": [
        {
            "context_options": ["Anna saw Bob so Anna", "Anna saw Bob so Bob"],
            "continuation": "walked home.",
            "gold": gold,
        }
        for gold in (0, 1)
    ],
    "triviaqa_3000.jsonl": [
        {"question": "Who found the lantern?", "aliases": ["Anna", "anna"]},
        {"question": "Where?", "aliases": ["near the harbour"]},
    ],
    "anli_r1.jsonl": [
        {"premise": SENTENCE, "hypothesis": "Anna was cold.", "label": n} for n in (0, 1, 2)
    ],
    "rte.jsonl": [{"sentence1": SENTENCE, "sentence2": "Anna walked.", "label": 0}],
    "multirc.jsonl": [{"paragraph": SENTENCE, "question": "Who?", "answer": "Anna", "label": 1}],
    "race.jsonl": [
        {
            "article": SENTENCE,
            "problems": (
                "[{'question': 'Who was cold?', 'options': ['Anna', 'Bob', 'I', 'we'], 'answer':"
                " 'B'}]"
            ),
        }
    ],
    "wsc.jsonl": [
        {
            "text": "Anna was cold so she left .",
            "span1_text": "Anna",
            "span2_text": "she",
            "span2_index": 4,
            "label": 1,
        }
    ],
}


def load(name: str, data_dir: Path, scratch: Path) -> Any:
    (task,) = load_tasks(TASKS[name], data_dir, scratch)
    return task


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EFFTRAIN_RUNS", str(folder / "runs"))
        make_run(folder, overrides=("model.seq_len=160",))
        return load_trained_model("random", None, torch.device("cpu"))


def ours(trained: TrainedModel) -> HarnessModel:
    """The run's model as the harness sees it."""
    return HarnessModel(
        model=trained.model,
        tokenizer=trained.tokenizer,
        context_length=trained.model.config.seq_len,
        batch_tokens=700,
    )


@pytest.fixture(scope="module")
def theirs(trained: TrainedModel, tmp_path_factory: pytest.TempPathFactory):
    from lm_eval.models.huggingface import HFLM

    directory = tmp_path_factory.mktemp("export") / "hf"
    tokenizer = (trained.run / "tokenizer.json").read_text()
    write_hf(trained.model, tokenizer, trained.tokenizer.eot_id, directory)

    class ShortHFLM(HFLM):
        # 256 by default: more than the model has positions. Ours writes up to half the context.
        max_gen_toks = 80

    return ShortHFLM(pretrained=str(directory), device="cpu", dtype="float32", batch_size=3)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    for name, items in MADE.items():
        write_jsonl(folder / name, items)
    return folder


def compare_with_hflm(
    trained: TrainedModel, theirs, name: str, data_dir: Path, limit: int | None, scratch: Path
) -> None:
    """Every metric of every item, and the task's values, by both."""
    score = score_task(load(name, data_dir, scratch), ours(trained), limit)
    tasks = {name: load(name, data_dir, scratch)}
    reference = lm_eval.evaluate(theirs, {"tasks": tasks}, limit=limit, bootstrap_iters=0)
    expected = {key.split(",")[0]: value for key, value in reference["results"][name].items()}
    samples = sorted(reference["samples"][name], key=lambda sample: sample["doc_id"])
    assert TASKS[name].metric in score.metrics
    assert [item["doc_hash"] for item in score.items] == [sample["doc_hash"] for sample in samples]
    for metric, found in score.metrics.items():
        close = partial(pytest.approx, rel=1e-4, abs=1e-4)
        assert found["value"] == close(expected[metric]), metric
        for item, sample in zip(score.items, samples, strict=True):
            assert item[metric] == close(sample[metric]), metric


@pytest.mark.parametrize("file", sorted(MADE))
def test_scores_are_hflm_s_on_made_sets(file, trained, theirs, made, tmp_path):
    name = next(name for name, spec in TASKS.items() if spec.file == file)
    compare_with_hflm(trained, theirs, name, made, None, tmp_path)


@pytest.mark.slow
def test_scores_are_hflm_s_on_real_sets(shared_data, trained, theirs, tmp_path):
    sets = shared_data / "evalpack"
    specs = find_specs([], sets)
    assert len(specs) == 13
    for spec in specs:
        limit = 2 if spec.name == "wikitext" else 6
        compare_with_hflm(trained, theirs, spec.name, sets, limit, tmp_path)


class TwoFilters:
    """A task of three items, each scored under two filters."""

    task_name = "filtered"
    eval_docs = (0, 1, 2, 3)

    def aggregation(self) -> dict[str, Any]:
        return {"exact_match": mean}


def test_a_task_with_two_filters_keeps_both_values(monkeypatch, trained):
    """Right as written on items 0 and 1, in small letters on all of the three."""
    samples = []
    for name in ("first", "lower"):
        for item in range(3):
            share = float(name == "lower" or item < 2)
            about = {"doc_id": item, "doc_hash": "h", "filter": name, "resps": [["text"]]}
            samples.append({**about, "metrics": ["exact_match"], "exact_match": share})
    results = {"samples": {"filtered": samples}}
    monkeypatch.setattr(lm_eval, "evaluate", lambda *_, **__: results)
    score = score_task(TwoFilters(), ours(trained), 3)
    values = {name: numbers["value"] for name, numbers in score.metrics.items()}
    assert values == {"exact_match,first": pytest.approx(2 / 3), "exact_match,lower": 1.0}
    assert len(score.items) == 6 and score.total == 4


def test_the_error_of_a_mean_and_of_a_perplexity():
    """Of -1 and -3: sqrt(2) / sqrt(2); by the delta method exp(2) times that."""
    assert _stderr(mean, [-1.0, -3.0]) == pytest.approx(1)
    assert _stderr(perplexity, [-1.0, -3.0]) == pytest.approx(math.exp(2))
    assert _stderr(mean, [-1.0]) is _stderr(max, [-1.0, -3.0]) is None
