#!/usr/bin/env bash
# Runs the GPU tests, benchmarks and examples on a machine with CUDA, and writes one dated JSON document.
set -euo pipefail
cd "$(dirname "$0")/.."
results=${1:-benchmarks/results}
mkdir -p "$results"
exec "${PYTHON:-python3}" -m benchmarks.gpu --json "$results/$(date -u +%Y-%m-%d)-cuda.json"
