#!/usr/bin/env bash
# On a machine with CUDA: the GPU tests, the benchmark and the examples; dated JSON under benchmarks/results/.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
results=${1:-benchmarks/results}
stamp=$(date -u +%Y-%m-%d)
mkdir -p "$results"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
"$python" -m pytest -m gpu -p no:randomly
"$python" -m benchmarks.scan_overhead --device cuda --json "$results/$stamp-cuda-scan_overhead.json"
"$python" -m benchmarks.checkpoints --repeats 3 --json "$results/$stamp-cuda-checkpoints.json"
"$python" -m benchmarks.training --device cuda --json "$results/$stamp-cuda-training.json"
for example in examples/training/*.py; do
  name=$(basename "$example" .py)
  case $name in
    digits | text)
      "$python" -m ampaudit train "$example" --device cuda --policy apex-o1,apex-o2,apex-o3 --fail-on never \
        --format json --force -o "$results/$stamp-cuda-train-$name.json" ;;
    *) "$python" "$example" ;;
  esac
done
"$python" -m ampaudit devices --format json > "$results/$stamp-cuda-devices.json"
"$python" -m ampaudit bench examples/efficientnet_b0.py --train --batch-size 8,32 --device cuda \
  --modes fp32,tf32,autocast,half,bf16,converted --force -o "$results/$stamp-cuda-efficientnet_b0.json"
"$python" -m ampaudit bench examples/sentence_encoder.py --batch-size 8,64 --device cuda \
  --modes fp32,tf32,autocast,half,bf16,converted,converted+compile --force -o "$results/$stamp-cuda-bench-sentence.json"
"$python" -m ampaudit tune examples/sentence_encoder.py --min-sqnr 60 --device cuda --force \
  -o "$results/$stamp-cuda-tune-sentence.json"
converted=$(mktemp -d)
"$python" -m ampaudit convert examples/sentence_encoder.py --device cuda -o "$converted/out"
"$python" -m ampaudit verify "$converted/out"
rm -r "$converted"
for example in examples/*.py; do
  name=$(basename "$example" .py)
  if [ "$name" = efficientnet_b0 ]; then continue; fi # it is for bench
  "$python" -m ampaudit scan "$example" --device cuda --batches 2 --fail-on never \
    --format json --force -o "$results/$stamp-cuda-$name.json"
done
