#!/usr/bin/env bash
# On a machine with CUDA: the GPU tests, the benchmarks and the examples, into one dated JSON document.
set -euo pipefail
cd "$(dirname "$0")/.."
results=${1:-benchmarks/results}
mkdir -p "$results"
exec "${PYTHON:-python3}" -m benchmarks.gpu --json "$results/$(date -u +%Y-%m-%d)-cuda.json"
