#!/usr/bin/env bash
# Download to .gpu/wheels what a GPU machine without a network lacks (Python 3.12 with torch), and
# print the commands. Run it from the project's root; PYTHON names an interpreter with pip.
set -euo pipefail

mkdir -p .gpu/wheels
wanted=()
for name in pydantic pydantic-core annotated-types typing-inspection typing-extensions; do
    wanted+=("$(sed -n "s/^\($name==[^ ]*\).*/\1/p" constraints.txt)")
done
rm -f .gpu/wheels/*.whl
"${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --no-deps \
    --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform manylinux2014_x86_64 --dest .gpu/wheels "${wanted[@]}"
cat <<'EOT'
there, from the project's root, with .gpu carried along:
  python3 benchmarks/gpu 1 --wheels .gpu/wheels --peer .gpu/train_gpt_simple.py --out OUT    480 s
  python3 benchmarks/gpu 2 --wheels .gpu/wheels --earlier OUT/figures.json --out OUT2        240 s
EOT
