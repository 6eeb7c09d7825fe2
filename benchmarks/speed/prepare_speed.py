"""`efftrain prepare` on one's own text, beside tokenizers and tiktoken alone, in one process.

    python benchmarks/speed/prepare_speed.py --tokenizer GPT2-FOLDER --repeats 2 'texts/*.txt'

Each repeat prepares into an empty cache: hashing, reading, checking, splitting, tokenizing,
writing. Prints MB of UTF-8 text per second by wall time, and CPU seconds, which other work on the
machine disturbs less.
"""

from __future__ import annotations

import argparse
import glob
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from efftrain_cli.data.prepare import prepare
from efftrain_cli.data.tokenizer import cut_pieces, load_tokenizer
from efftrain_cli.recipe.sections import Data


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", help="glob of .txt files")
    parser.add_argument(
        "--tokenizer", required=True, help="GPT-2's, or another that tiktoken can encode with"
    )
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    texts = [Path(name).read_text(encoding="utf-8") for name in sorted(glob.glob(options.text))]
    size = sum(len(text.encode()) for text in texts) / 1e6
    tokenizer = load_tokenizer(options.tokenizer)
    fast = tokenizer.fast
    if fast is None:
        raise SystemExit(f"{options.tokenizer} is not encoded by tiktoken")
    pieces = [piece for text in texts for piece in cut_pieces(iter([text]))]

    def prepared() -> None:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["EFFTRAIN_CACHE"] = folder
            prepare(Data(train=options.text, tokenizer=options.tokenizer))

    work: dict[str, Callable[[], object]] = {
        "efftrain prepare": prepared,
        "tiktoken alone": lambda: fast.encode_ordinary_batch(
            pieces, num_threads=os.cpu_count() or 1
        ),
        "tokenizers alone": lambda: tokenizer.backend.encode_batch_fast(
            pieces, add_special_tokens=False
        ),
    }
    print(f"{size:.1f} MB, {os.cpu_count()} CPU cores, load {os.getloadavg()[0]:.1f}")
    for _ in range(options.repeats):
        for name, run in work.items():
            began, used = time.perf_counter(), time.process_time()
            run()
            seconds, cpu = time.perf_counter() - began, time.process_time() - used
            print(f"{name:<17}  {size / seconds:5.1f} MB/s, {cpu:5.1f} s of CPU time")


if __name__ == "__main__":
    main()
