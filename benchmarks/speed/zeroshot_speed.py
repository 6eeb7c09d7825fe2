"""LAMBADA items per second of `efftrain eval-zeroshot` and of lm-evaluation-harness's own HFLM:
same machine, same weights (GPT-2 117M shapes, random), same requests, one process.

    python benchmarks/speed/zeroshot_speed.py --data-dir SETS --tokenizer GPT2-FOLDER [--items 48]
    [--repeats 3]

The two take turns, and each one's best turn counts, so that another program on the machine harms
neither alone. HFLM's batch size is the best of those tried in its first turn. Time is that of
`loglikelihood`, tokenizing included.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

import torch
from lm_eval.models.huggingface import HFLM

from efftrain_cli.data.tokenizer import load_tokenizer
from efftrain_cli.model.gpt import GPT, GPTConfig
from efftrain_cli.model.hf import write_hf
from efftrain_cli.zeroshot.model import HarnessModel
from efftrain_cli.zeroshot.tasks import TASKS, load_tasks

HFLM_BATCH_SIZES = (1, 8, 16)


def seconds(answer: Callable[[], object]) -> tuple[float, float, object]:
    """(wall seconds, CPU seconds, what it answered)."""
    wall, cpu = time.perf_counter(), time.process_time()
    answered = answer()
    return time.perf_counter() - wall, time.process_time() - cpu, answered


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        required=True,
        help="folder with lambada_openai.jsonl (docs/zeroshot.md)",
    )
    parser.add_argument(
        "--tokenizer", required=True, help="folder with GPT-2's vocabulary and merges"
    )
    parser.add_argument("--task", default="lambada_openai")
    parser.add_argument("--items", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)

    tokenizer = load_tokenizer(options.tokenizer)
    config = GPTConfig(
        n_layer=12,
        n_head=12,
        n_embd=768,
        seq_len=1024,
        vocab_size=tokenizer.vocab_size,
        padded_vocab_size=50304,
    )
    model = GPT(config)
    model.load_state_dict(dict(model.initial_weights(0)), strict=False)
    model.eval()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tokenizer.save(folder / "tokenizer.json")
        write_hf(model, (folder / "tokenizer.json").read_text(), tokenizer.eot_id, folder / "hf")
        theirs = HFLM(pretrained=str(folder / "hf"), device="cpu", dtype="float32", batch_size=1)
        ours = HarnessModel(model=model, tokenizer=tokenizer, context_length=1024)
        (task,) = load_tasks(TASKS[options.task], options.data_dir, folder)
        task.build_all_requests(limit=options.items)
        requests = task.instances
        print(
            f"{options.task}: {options.items} items, {len(requests)} requests,"
            f" {torch.get_num_threads()} threads"
        )

        def ask(model_: HarnessModel | HFLM) -> object:
            return model_.loglikelihood(requests)

        ask_few = requests[:4]
        ours.loglikelihood(ask_few)  # warm caches of both
        theirs.loglikelihood(ask_few)
        best = {}
        for size in HFLM_BATCH_SIZES:
            theirs.batch_size_per_gpu = size
            best[size] = seconds(lambda: ask(theirs))[0]
            print(f"HFLM, batch size {size}: {options.items / best[size]:.2f} items/s")
        theirs.batch_size_per_gpu = min(best, key=best.__getitem__)
        our_turns, their_turns = [], []
        for turn in range(options.repeats):
            our_turns.append(seconds(lambda: ask(ours)))
            their_turns.append(seconds(lambda: ask(theirs)))
            print(
                f"turn {turn + 1}: efftrain {our_turns[-1][0]:.1f} s ({our_turns[-1][1]:.1f} CPU"
                f" s), HFLM {their_turns[-1][0]:.1f} s ({their_turns[-1][1]:.1f} CPU s)",
                flush=True,
            )
        difference = max(
            abs(a[0] - b[0]) for a, b in zip(our_turns[0][2], their_turns[0][2], strict=True)
        )
        mine, other = min(turn[0] for turn in our_turns), min(turn[0] for turn in their_turns)
        mine_cpu, other_cpu = (
            min(turn[1] for turn in our_turns),
            min(turn[1] for turn in their_turns),
        )
        print(
            f"efftrain {options.items / mine:.2f} items/s, HFLM {options.items / other:.2f} items/s"
            f" (batch size {theirs.batch_size_per_gpu})"
        )
        print(f"ratio {other / mine:.2f} by wall time, {other_cpu / mine_cpu:.2f} by CPU time")
        print(f"largest difference of a log-probability: {difference:.1e}")


if __name__ == "__main__":
    main()
