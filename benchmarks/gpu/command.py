"""Runs pieces part by part and keeps what they measure."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.gpu import (
    correctness,
    device,
    devices,
    evidence,
    largest,
    lengths,
    levers,
    methods,
    pair,
    reference,
    resume,
    speed,
)
from benchmarks.gpu.measuring import Bench, Part
from benchmarks.gpu.table import Results, full_table, page_table

PIECES: dict[str, tuple[Part, ...]] = {
    "device": device.PARTS,
    "speed": speed.PARTS,
    "reference": reference.PARTS,
    "correctness": correctness.PARTS,
    "largest": largest.PARTS,
    "lengths": lengths.PARTS,
    "resume": resume.PARTS,
    "levers": levers.PARTS,
    "methods": methods.PARTS,
    "evidence": evidence.PARTS,
    "pair": pair.PARTS,
    "devices": devices.PARTS,
}
Save = Callable[[dict[str, object]], None]


BUDGET = 520.0
"""Seconds of one call: with the start it stays below nine minutes."""
COMPILED = "compiled-graphs.bin"
MOST_COMPILED = 16 * 2**20
"""Bytes of compiled graphs that are carried to the next call at most."""
GRACE = 10.0
"""Seconds that a part has to end by itself once its time is over."""


def measure(part: Part, bench: Bench, save: Save, give_up: Callable[[], None]) -> dict[str, object]:
    """Run a part for its declared seconds at most; the record is saved after every figure.

    An error is part of the record. Once the seconds are over, an exception ends the part. `GRACE`
    seconds later, if a call into a library still has not returned, `give_up` is called from another
    thread, the record being saved.
    """
    most = 1000.0 if bench.smoke else part.seconds
    figures: list[object] = []
    record: dict[str, object] = {"status": "begun", "seconds": 0.0, "figures": figures}

    def stop(number: int, frame: object) -> None:
        raise TimeoutError(f"stopped after its {most:.0f} s; figures up to there are kept")

    def abandon() -> None:
        record["seconds"] = time.monotonic() - start
        record["status"] = "stopped"
        record["error"] = (
            f"did not end within {GRACE:.0f} s of its {most:.0f} s; the figures are kept"
        )
        save(record)
        give_up()

    before = signal.signal(signal.SIGALRM, stop)
    start = time.monotonic()
    watchdog = threading.Timer(most + GRACE, abandon)
    watchdog.daemon = True
    watchdog.start()
    signal.setitimer(signal.ITIMER_REAL, most)
    try:
        for figure in part.work(bench):
            figures.append(figure)
            record["seconds"] = time.monotonic() - start
            save(record)
        record["status"] = "ok"
    except TimeoutError as error:
        record |= {"status": "stopped", "error": str(error)}
    except Exception as error:
        record |= {
            "status": "failed",
            "error": f"{type(error).__name__}: {error}",
            "traceback": traceback.format_exc(),
        }
    finally:
        watchdog.cancel()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    record["seconds"] = time.monotonic() - start
    return record


def measure_in_a_process(piece: str, part: Part, bench: Bench) -> dict[str, object]:
    """Runs a part that needs an environment of its own."""
    with tempfile.TemporaryDirectory(dir=bench.folder) as folder:
        command = [
            sys.executable,
            str(Path(__file__).parent),
            piece,
            "--part",
            part.name,
            "--out",
            folder,
        ]
        command += ["--smoke"] if bench.smoke else []
        environment = {**os.environ, **part.environment}
        most = 1000.0 if bench.smoke else part.seconds + 2 * GRACE
        output = Path(folder) / "output"
        # Killed after `most` seconds: what it measured until then is in its file.
        with output.open("w") as stream, suppress(subprocess.TimeoutExpired):
            subprocess.run(
                command,
                env=environment,
                stdout=stream,
                stderr=stream,
                timeout=most,
                check=False,
            )
        try:
            return json.loads((Path(folder) / "gpu.json").read_text())["pieces"][piece][part.name]
        except (OSError, KeyError, ValueError):
            error = f"its process left no result: {output.read_text()[-1500:]}"
            return {"status": "failed", "seconds": 0.0, "figures": [], "error": error}


def read(path: Path) -> Results:
    """The results in a gpu.json, or none."""
    return json.loads(path.read_text(encoding="utf-8"))["pieces"] if path.exists() else {}


def write(path: Path, results: Results, smoke: bool) -> None:
    """Writes gpu.json, whole or not at all."""
    written = {
        "date": str(datetime.now(UTC).date()),
        "smoke": smoke,
        "device": (
            platform.processor() or platform.machine() if smoke else torch.cuda.get_device_name()
        ),
        "torch": torch.__version__,
        "pieces": {piece: results[piece] for piece in PIECES if piece in results},
    }
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(written, indent=1, default=str), encoding="utf-8")
    temporary.replace(path)


def load_compiled(path: Path) -> None:
    """Give the compiler the graphs that an earlier call left beside its results, if it did."""
    if not path.exists():
        return
    try:
        torch.compiler.load_cache_artifacts(path.read_bytes())
    except Exception as error:  # of another version of PyTorch, say: costs time, no figure
        print(f"{path} is not used: {type(error).__name__}: {error}")


def save_compiled(path: Path, most: int = MOST_COMPILED) -> None:
    """Write the graphs that this process has compiled for a later call on a machine with an empty
    cache, if they take `most` bytes at most."""
    try:
        artifacts = torch.compiler.save_cache_artifacts()
    except Exception as error:
        print(f"compiled graphs are not kept: {type(error).__name__}: {error}")
        return
    if artifacts is None:
        return
    content, _ = artifacts
    if len(content) > most:
        print(f"compiled graphs are not kept: {len(content):,} bytes, more than {most:,}")
        return
    path.write_bytes(content)


def parse_options(description: str) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/gpu",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    pieces = [*PIECES, "table"]
    parser.add_argument(
        "pieces", nargs="+", choices=pieces, metavar="PIECE", help=", ".join(pieces)
    )
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="folder for gpu.json")
    parser.add_argument(
        "--earlier", type=Path, action="append", default=[], help="gpu.json of an earlier call"
    )
    parser.add_argument(
        "--budget", type=float, default=BUDGET, help="seconds; a part that needs more is not begun"
    )
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install for this call")
    parser.add_argument("--part", help="this part only")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on a CPU")
    parser.add_argument("--fresh", action="store_true", help="measure again what is there already")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    return parser.parse_args()


def print_table(results: Results, sources: list[Path]) -> None:
    """Print docs/performance.md's table from results read from `sources`."""
    about = json.loads(sources[-1].read_text(encoding="utf-8"))
    smoke = " Tiny shapes on a CPU: no figure means anything." if about["smoke"] else ""
    where = f"{about['device']}, {about['date']}, PyTorch {about['torch']}"
    print(page_table(results, f"Measured on {where}.{smoke}"))


def main(description: str) -> None:
    options = parse_options(description)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "gpu.json"
    results: Results = {}
    for source in (*options.earlier, path):
        if source in options.earlier and not source.exists():
            sys.exit(f"--earlier {source}: there is no such file")
        for piece, parts in read(source).items():
            results.setdefault(piece, {}).update(parts)
    if options.pieces == ["table"]:
        sources = [source for source in (*options.earlier, path) if source.exists()]
        if not sources:
            sys.exit(f"{path}: nothing was measured yet; python benchmarks/gpu --help says how")
        print_table(results, sources)
        return
    if not options.smoke and not torch.cuda.is_available():
        sys.exit(
            "no CUDA device: use --smoke to try the script on a CPU, or"
            " benchmarks/speed/side_by_side.py to measure one"
        )
    for source in options.earlier:
        load_compiled(source.with_name(COMPILED))

    # After a part that took the process down the script starts itself anew; what failed is then
    # left as it is.
    continued = options.until is not None
    deadline = options.until if continued else time.monotonic() + options.budget

    def start_anew() -> None:
        arguments = [sys.executable, *sys.argv, "--until", str(deadline)]
        os.execv(sys.executable, arguments)

    late = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(
            device=torch.device("cpu" if options.smoke else "cuda"),
            smoke=options.smoke,
            folder=Path(folder),
        )
        for piece in options.pieces:
            for part in PIECES[piece]:
                if options.part not in (None, part.name):
                    continue
                known = results.get(piece, {}).get(part.name)
                if known is not None and (
                    continued or (known["status"] == "ok" and not options.fresh)
                ):
                    continue
                begins = options.smoke or options.part
                if not begins and deadline - time.monotonic() < part.seconds:
                    late.append(f"{piece}, {part.name}")
                    continue

                def save(record: dict[str, object], piece: str = piece, part: Part = part) -> None:
                    results.setdefault(piece, {})[part.name] = record
                    write(path, results, options.smoke)

                own_process = part.environment and not options.part
                if own_process:
                    record = measure_in_a_process(piece, part, bench)
                else:
                    record = measure(part, bench, save, start_anew)
                save(record)
                print(
                    f"{piece}, {part.name}: {record['status']}, {record['seconds']:.0f} s",
                    flush=True,
                )
                broken = ("CUDA error", "device-side assert")
                if any(words in str(record.get("error")) for words in broken) and not own_process:
                    start_anew()  # nothing works any more in this process
    write(path, results, options.smoke)
    print(full_table({piece: results[piece] for piece in options.pieces if piece in results}))
    save_compiled(options.out / COMPILED)
    if late:
        print("\nno time left for: " + "; ".join(late) + ". Run the same command again")
    asked = [record for piece in options.pieces for record in results.get(piece, {}).values()]
    if late or any(record["status"] != "ok" for record in asked):
        sys.exit(1)
