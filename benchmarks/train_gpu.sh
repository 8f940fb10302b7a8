#!/usr/bin/env bash
# Trains all bundled drafters of SmolLM2 from nothing on one large GPU: 20 million tokens of its own
# text, then one drafter after the other. No network. What it writes drops into the package:
#
#     bash benchmarks/train_gpu.sh OUT [SCALE]
#     cp -r OUT/eagle3 OUT/medusa OUT/dflash OUT/dspark checkpoints/bundled/smollm2-135m/
#     cp -r OUT/draft_model checkpoints/bundled/smollm2-135m/draft
#
# SCALE 0.001 rehearses it on a CPU.
set -euo pipefail
cd "$(dirname "$0")/.."
out="${1:?usage: benchmarks/train_gpu.sh OUT [SCALE]}"
scale="${2:-1.0}"
python="${PYTHON:-.venv/bin/python}"
mkdir -p "$out"
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$out/xla}"
"$python" benchmarks/train_all.py --out "$out" --scale "$scale" ${DRAFTERS:+--drafters $DRAFTERS} \
  | tee "$out/report.json"
