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
import time
import traceback
from collections.abc import Callable
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
from benchmarks.gpu.measuring import ROOT, Bench, Part
from benchmarks.gpu.table import Results, full_table, page_table

PIECES: dict[str, tuple[Part, ...]] = {
    "device": device.PARTS,
    "speed": speed.PARTS,
    "correctness": correctness.PARTS,
    "lengths": lengths.PARTS,
    "reference": reference.PARTS,
    "resume": resume.PARTS,
    "largest": largest.PARTS,
    "levers": levers.PARTS,
    "methods": methods.PARTS,
    "devices": devices.PARTS,
    "evidence": evidence.PARTS,
    "pair": pair.PARTS,
}
Save = Callable[[dict[str, object]], None]


def measure(part: Part, bench: Bench, save: Save) -> dict[str, object]:
    """Runs a part within three times its usual seconds; the record is saved after every figure, and an error is part of
    it."""
    most = 1000.0 if bench.smoke else max(60.0, 3 * part.seconds)
    figures: list[object] = []
    record: dict[str, object] = {"status": "begun", "seconds": 0.0, "figures": figures}

    def late(number: int, frame: object) -> None:
        raise TimeoutError(f"more than {most:.0f} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, most)
    start = time.monotonic()
    try:
        for figure in part.work(bench):
            figures.append(figure)
            record["seconds"] = time.monotonic() - start
            save(record)
        record["status"] = "ok"
    except Exception as error:
        record |= {
            "status": "failed",
            "error": f"{type(error).__name__}: {error}",
            "traceback": traceback.format_exc(),
        }
    finally:
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
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        try:
            return json.loads((Path(folder) / "gpu.json").read_text())["pieces"][piece][part.name]
        except (OSError, KeyError, ValueError):
            error = (
                f"its process ended with {done.returncode}: {(done.stdout + done.stderr)[-1500:]}"
            )
            return {"status": "failed", "seconds": 0.0, "figures": [], "error": error}


def read(path: Path) -> Results:
    """The results in a gpu.json, or none."""
    return json.loads(path.read_text(encoding="utf-8"))["pieces"] if path.exists() else {}


def write(path: Path, results: Results, smoke: bool) -> None:
    """Writes gpu.json, whole or not at all."""
    written = {
        "date": str(datetime.now(UTC).date()),
        "smoke": smoke,
        "device": platform.processor() or platform.machine()
        if smoke
        else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "pieces": {piece: results[piece] for piece in PIECES if piece in results},
    }
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(written, indent=1, default=str), encoding="utf-8")
    temporary.replace(path)


def main(description: str) -> None:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/gpu",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "pieces",
        nargs="+",
        choices=[*PIECES, "table"],
        metavar="PIECE",
        help=", ".join([*PIECES, "table"]),
    )
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="folder for gpu.json")
    parser.add_argument(
        "--earlier", type=Path, action="append", default=[], help="gpu.json of an earlier call"
    )
    parser.add_argument(
        "--budget", type=float, default=530, help="seconds; no part begins that has no time left"
    )
    parser.add_argument("--part", help="this part only")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on a CPU")
    parser.add_argument("--fresh", action="store_true", help="measure again what is there already")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
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
        about = json.loads(sources[-1].read_text(encoding="utf-8"))
        smoke = " Tiny shapes on a CPU: no figure means anything." if about["smoke"] else ""
        print(
            page_table(
                results,
                f"Measured on {about['device']}, {about['date']}, PyTorch {about['torch']}.{smoke}",
            )
        )
        return
    if not options.smoke and not torch.cuda.is_available():
        sys.exit(
            "no CUDA device: use --smoke to try the script on a CPU, or benchmarks/side_by_side.py to measure one"
        )

    # After a crash of the device the script starts itself anew; what failed is then left as it is.
    continued = options.until is not None
    deadline = options.until if continued else time.monotonic() + options.budget
    late = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(
            device=torch.device("cpu" if options.smoke else "cuda"),
            smoke=options.smoke,
            folder=Path(folder),
        )
        for piece in options.pieces:
            for part in PIECES[piece]:
                known = results.get(piece, {}).get(part.name)
                done = known is not None and (known["status"] == "ok" or continued)
                if (options.part or part.name) != part.name or (
                    done and (continued or not options.fresh)
                ):
                    continue
                if (
                    not options.smoke
                    and not options.part
                    and deadline - time.monotonic() < part.seconds
                ):
                    late.append(f"{piece}, {part.name}")
                    continue

                def save(record: dict[str, object], piece: str = piece, part: Part = part) -> None:
                    results.setdefault(piece, {})[part.name] = record
                    write(path, results, options.smoke)

                own_process = part.environment and not options.part
                record = (
                    measure_in_a_process(piece, part, bench)
                    if own_process
                    else measure(part, bench, save)
                )
                save(record)
                print(
                    f"{piece}, {part.name}: {record['status']}, {record['seconds']:.0f} s",
                    flush=True,
                )
                broken = ("CUDA error", "device-side assert")
                if any(words in str(record.get("error")) for words in broken) and not own_process:
                    # Nothing works any more in this process.
                    os.chdir(ROOT)
                    os.execv(sys.executable, [sys.executable, *sys.argv, "--until", str(deadline)])
    write(path, results, options.smoke)
    print(full_table({piece: results[piece] for piece in options.pieces if piece in results}))
    if late:
        print("\nno time left for: " + "; ".join(late) + ". Run the same command again")
    asked = [record for piece in options.pieces for record in results.get(piece, {}).values()]
    if late or any(record["status"] != "ok" for record in asked):
        sys.exit(1)
