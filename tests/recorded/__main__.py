"""python -m tests.recorded              compare every part with its file
python -m tests.recorded PART ...        compare these
python -m tests.recorded --write PART    write the file of a part
python -m tests.recorded bits --against COMMIT [CASE ...]    compare training with a commit's
python -m tests.recorded bits --out FILE [CASE ...]          train, and write what it came to
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.recorded.parts import PARTS


def main(words: list[str]) -> int:
    """Run a command line; return its exit code, 1 if anything differs."""
    if words[:1] == ["bits"]:
        return bits_main(words[1:])

    parser = argparse.ArgumentParser("tests.recorded", usage=__doc__)
    parser.add_argument("parts", nargs="*")
    parser.add_argument("--write", action="append", default=[], choices=list(PARTS))
    options = parser.parse_args(words)
    if unknown := sorted(set(options.parts) - set(PARTS)):
        parser.error(f"no parts: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    for name in options.write:
        PARTS[name].write()
        print(f"wrote {PARTS[name].file}")
    if options.write:
        return 0

    lines = []
    for name in options.parts or PARTS:
        found = PARTS[name].compare()
        lines += found
        print(f"{name:14} {len(found)} differences")
    print("\n".join(lines))
    return int(bool(lines))


def bits_main(words: list[str]) -> int:
    from tests.recorded.bits import compare_with, write_bits

    parser = argparse.ArgumentParser("tests.recorded bits", usage=__doc__)
    parser.add_argument("cases", nargs="*")
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--against", metavar="COMMIT")
    task.add_argument("--out", metavar="FILE", type=Path)
    options = parser.parse_args(words)
    if options.out:
        write_bits(options.out, options.cases)
        return 0
    return compare_with(options.against, options.cases)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
