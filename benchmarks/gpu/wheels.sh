#!/bin/sh
# Gather into a folder the wheels that `python -m benchmarks.gpu` needs on a machine without a network: Python 3.12,
# x86-64, with torch, triton, transformers, accelerate, einops, scipy, matplotlib, pillow, psutil, tqdm and PyYAML
# already installed. Versions are those of constraints.txt. There:
#     python3 -m pip install --no-index --no-deps --target SITE FOLDER/*.whl && export PYTHONPATH=SITE
# Not gathered: av (35 MiB), which only video files need; transformer-engine and flash-attn, whose rows say so.
set -eu
[ $# -eq 1 ] || { echo "usage: $0 FOLDER" >&2; exit 2; }
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
mkdir -p "$1"
platforms=$(for glibc in 2_28 2_27 2_24 2_17; do printf -- '--platform manylinux_%s_x86_64 ' "$glibc"; done)
# shellcheck disable=SC2086  # several words
"$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp $platforms \
    -c "$root/constraints.txt" -d "$1" diffusers ftfy hydra-core omegaconf peft torchao wcwidth
# antlr4 has no wheel of the version that omegaconf needs; this one is pure Python.
"$python" -m pip wheel -q --no-deps -c "$root/constraints.txt" -w "$1" antlr4-python3-runtime
du -sh "$1"
