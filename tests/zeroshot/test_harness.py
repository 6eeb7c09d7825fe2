"""Our model in lm-evaluation-harness against the harness's own HFLM on the exported model: same
items, same scores."""

from __future__ import annotations

import os
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

from efftrain_cli.model.hf import write_hf  # noqa: E402
from efftrain_cli.training.trained_model import TrainedModel, load_trained_model  # noqa: E402
from efftrain_cli.zeroshot.harness import evaluate_task, load_task  # noqa: E402
from efftrain_cli.zeroshot.language_model import LanguageModel  # noqa: E402
from efftrain_cli.zeroshot.local_data import tasks_in  # noqa: E402
from efftrain_cli.zeroshot.score import Evaluator, Request  # noqa: E402
from efftrain_cli.zeroshot.suites import TASKS  # noqa: E402
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
    "arc_easy.jsonl": [
        {"query": "Question: What is cold?", "choices": ["evening", "ship", "a"], "gold": 0}
    ],
    "boolq.jsonl": [
        {
            "query": f"Passage: {SENTENCE}\nQuestion: is it cold?",
            "choices": ["no", "yes"],
            "gold": 1,
        }
    ],
    "copa.jsonl": [
        {"query": "It was cold, therefore", "choices": ["she walked home.", "i forgot."], "gold": 0}
    ],
    "piqa.jsonl": [
        {"goal": "Walk home", "sol1": "at night", "sol2": "in the ship ", "label": n % 2}
        for n in range(3)
    ],
    "winogrande.jsonl": [
        {
            "context_options": ["Anna saw Bob so Anna", "Anna saw Bob so Bob"],
            "continuation": "walked home.",
            "gold": n,
        }
        for n in (0, 1)
    ],
    "triviaqa_3000.jsonl": [
        {"question": "Who found the lantern?", "aliases": ["Anna", "anna"]},
        {"question": "Where?", "aliases": ["near the harbour"]},
    ],
    "webqs.jsonl": [{"question": "who was cold?", "answers": ["Nobody", "Anna", "Anna K."]}],
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
    "record.jsonl": [
        {
            "passage": f"{SENTENCE}\n@highlight\nAnna is home",
            "query": "@placeholder walked home",
            "entities": ["Anna", "Bob"],
            "answers": ["Anna"],
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


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EFFTRAIN_RUNS", str(folder / "runs"))
        make_run(folder, overrides=("model.seq_len=160",))
        return load_trained_model("random", None, torch.device("cpu"))


@pytest.fixture(scope="module")
def ours(trained: TrainedModel) -> LanguageModel:
    evaluator = Evaluator(
        model=trained.model, context_length=trained.model.config.seq_len, batch_tokens=700
    )
    return LanguageModel(evaluator, trained.tokenizer)


@pytest.fixture(scope="module")
def theirs(trained: TrainedModel, tmp_path_factory: pytest.TempPathFactory):
    from lm_eval.models.huggingface import HFLM

    directory = tmp_path_factory.mktemp("export") / "hf"
    write_hf(
        trained.model,
        (trained.run / "tokenizer.json").read_text(),
        trained.tokenizer.eot_id,
        directory,
    )

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
    task: str, ours: LanguageModel, theirs, data_dir: Path, limit: int | None, scratch: Path
) -> None:
    """Every metric of every item, and the task's values, by both."""
    score = evaluate_task(TASKS[task], ours, data_dir, limit, scratch)
    reference = lm_eval.evaluate(
        lm=theirs,
        task_dict={"tasks": {task: load_task(TASKS[task], data_dir, scratch)}},
        limit=limit,
        bootstrap_iters=0,
        log_samples=True,
    )
    found = {name.split(",")[0]: value for name, value in reference["results"][task].items()}
    for metric in TASKS[task].metrics:
        assert score.values[metric] == pytest.approx(found[metric], rel=1e-4, abs=1e-4), metric
    samples = sorted(reference["samples"][task], key=lambda sample: sample["doc_id"])
    assert [item["doc_hash"] for item in score.items] == [sample["doc_hash"] for sample in samples]
    for item, sample in zip(score.items, samples, strict=True):
        for metric in TASKS[task].metrics:
            assert item[metric] == pytest.approx(sample[metric], rel=1e-4, abs=1e-4), (
                metric,
                item["doc_id"],
            )


@pytest.mark.parametrize("file", sorted(MADE))
def test_scores_are_hflm_s_on_made_sets(file, ours, theirs, made, tmp_path):
    task = next(name for name, task in TASKS.items() if task.file == file and task.definition)
    compare_with_hflm(task, ours, theirs, made, None, tmp_path)


@pytest.mark.slow
def test_scores_are_hflm_s_on_real_sets(shared_data, ours, theirs, tmp_path):
    tasks = [name for name in tasks_in(shared_data / "evalpack") if TASKS[name].definition]
    assert len(tasks) == 13
    for task in tasks:
        limit = 2 if task == "wikitext" else 6
        compare_with_hflm(task, ours, theirs, shared_data / "evalpack", limit, tmp_path)


def test_context_and_continuation_are_split_as_the_harness_splits(ours):
    """Empty and blank contexts, trailing spaces and words that continue; (whole text, its context)
    by hand."""
    from lm_eval.api.instance import Instance

    cases = [
        ((SENTENCE, " Anna"), f"{SENTENCE} Anna", SENTENCE),
        ((SENTENCE + "  ", "Anna"), f"{SENTENCE}  Anna", SENTENCE),  # spaces go with what follows
        (("", "Anna found"), "Anna found", None),  # after end-of-text
        (("  ", "Anna"), "  Anna", "  "),
        (("Anna fou", "nd the lantern"), "Anna found the lantern", "Anna fou"),
        (("Anna", " found"), "Anna found", "Anna"),
    ]
    requests = []
    expected = []
    encode = ours.tok_encode
    for i, (pair, whole, context) in enumerate(cases):
        metadata = ("t", i, 1)
        requests.append(Instance("loglikelihood", doc={}, arguments=pair, idx=0, metadata=metadata))
        tokens = encode(whole)
        border = 0 if context is None else len(encode(context))
        before = tokens[:border] if border else [ours.eot_token_id]
        expected.append(Request(tuple(before), tuple(tokens[border:])))
    ours.begin("t")
    scores = ours.loglikelihood(requests)
    assert ours.requests == 6
    # "Anna fou" + "nd the lantern": the context alone ends in other tokens than it has inside the
    # whole.
    alone = encode("Anna fou")
    assert ours.boundary_mismatches == int(encode("Anna found the lantern")[: len(alone)] != alone)
    for score, own in zip(scores, ours.evaluator.score(expected), strict=True):
        assert score == (pytest.approx(own.logprob, abs=1e-5), own.greedy)


def test_scores_do_not_depend_on_the_batch(trained, made, tmp_path):
    scores = []
    for batch_tokens in (64, 20_000):
        evaluator = Evaluator(model=trained.model, context_length=128, batch_tokens=batch_tokens)
        model = LanguageModel(evaluator, trained.tokenizer)
        scores.append([
            evaluate_task(TASKS[name], model, made, None, tmp_path)
            for name in ("hellaswag", "lambada_openai", "wikitext", "triviaqa")
        ])  # fmt: skip
    for one, other in zip(*scores, strict=True):
        assert one.values == pytest.approx(other.values, rel=1e-5, abs=1e-5)
        assert one.protocol == other.protocol
    # What stands behind the version: items from a file that differ from the Hub's, and the window
    # of wikitext.
    marks = [score.protocol.partition(" v")[2].split(" ")[1:] for score in scores[0]]
    assert marks == [["local"], [], ["window", "128"], ["local"]]


def test_cut_contexts_are_counted(trained, made, tmp_path):
    model = LanguageModel(Evaluator(model=trained.model, context_length=20), trained.tokenizer)
    score = evaluate_task(TASKS["anli_r1"], model, made, None, tmp_path)
    assert score.requests == 9 and score.truncated == 9
    assert (
        evaluate_task(TASKS["wikitext"], model, made, None, tmp_path).truncated == 0
    )  # windows are not cuts


def test_anli_is_the_harness_s_definition(made, tmp_path):
    task = load_task(TASKS["anli_r1"], made, tmp_path)
    documents = list(task.eval_docs)
    assert (
        task.doc_to_text(documents[0])
        == f"{SENTENCE}\nQuestion: Anna was cold. True, False, or Neither?\nAnswer:"
    )
    assert task.doc_to_choice(documents[0]) == ["True", "Neither", "False"]
    assert [task.doc_to_target(document) for document in documents] == ["True", "Neither", "False"]
    assert task.config.num_fewshot == 0


def test_squad_measures():
    """Values of the official script's rules, worked out by hand."""
    from efftrain_cli.zeroshot.squad_metrics import compute_exact, compute_f1

    assert compute_exact("The Lantern!", "lantern") == 1
    assert compute_exact("lantern", "lanterns") == 0
    assert compute_f1("the old captain", "captain of the ship") == pytest.approx(2 * 1 / (2 + 3))
    assert compute_f1("the", "a") == 1.0 and compute_f1("the", "ship") == 0.0
