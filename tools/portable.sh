#!/usr/bin/env bash
# Runs tests of the first tier under the settings of other machines: processors, threads, locales, terminals,
# home directories, test orders.
# Usage: tools/portable.sh BIN [PART...]. The parts are plain, which CI runs, and numeric, threads, text and orders, which
# run by default.
set -uo pipefail
cd "$(dirname "$0")/.."
bin=$(realpath "$1")
shift
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(numeric threads text orders)

# numeric and memory: results may depend on the processor and its libraries; text: output for people
numeric=(
    tests/run/test_{accuracy,buffers,evidence,extreme_value,low_precision,measure,origins,run}.py
    tests/instruments/backward/test_gradients.py tests/bounds/test_bounds.py
    tests/audit/test_{findings,models,proofs,silent}.py tests/trace/test_{half,oracle_ops,unusual_models}.py
    tests/training/test_{prepare,scaler}.py tests/export/test_storage.py
)
memory=(tests/benchmarking -k "predicted or kernel or peak or bytes")
text=(
    tests/audit/test_bad_input.py tests/core/test_files.py tests/render/test_{golden,outputs}.py
    tests/report/test_{report,saved}.py tests/cli/test_{cli,rules_cli,terminal}.py
)
home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT
mkdir "$home/with spaces ü"
failed=()

# setting NAME [VARIABLE=VALUE | -u VARIABLE]... -- PYTEST ARGUMENTS
setting() {
    local name=$1 variables=()
    shift
    while [ "$1" != -- ]; do variables+=("$1"); shift; done
    shift
    echo "== $name"
    env "${variables[@]}" "$bin/python" -m pytest -q -n 2 --dist loadfile --tier 1 "$@" || failed+=("$name")
}

for part in "${parts[@]}"; do
    case $part in
    plain) # neither vector instructions nor oneDNN's kernels
        setting "plain kernels" ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 -- "${numeric[@]}" --no-onednn
        setting "plain kernels, memory" ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 -- "${memory[@]}" --no-onednn
        ;;
    numeric)
        for pair in "default SSE41" "avx2 AVX2" "avx512 AVX512_CORE" "avx512 AVX512_CORE_AMX"; do
            read -r aten onednn <<<"$pair"
            setting "ATen $aten, oneDNN $onednn" ATEN_CPU_CAPABILITY="$aten" ONEDNN_MAX_CPU_ISA="$onednn" -- "${numeric[@]}"
            setting "ATen $aten, oneDNN $onednn, memory" ATEN_CPU_CAPABILITY="$aten" ONEDNN_MAX_CPU_ISA="$onednn" -- "${memory[@]}"
        done
        setting "no oneDNN" ATEN_CPU_CAPABILITY=default -- "${numeric[@]}" --no-onednn
        setting "no oneDNN, memory" ATEN_CPU_CAPABILITY=default -- "${memory[@]}" --no-onednn
        ;;
    threads)
        for count in 2 16; do setting "$count threads" OMP_NUM_THREADS=$count -- "${numeric[@]}" --threads $count; done
        ;;
    text)
        setting "ASCII" -u LANG LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 -- "${text[@]}"
        setting "narrow, no color" COLUMNS=40 TERM=dumb NO_COLOR=1 -- "${text[@]}"
        setting "wide, color, CI" COLUMNS=300 FORCE_COLOR=1 CI=true -- "${text[@]}"
        setting "Kathmandu" TZ=Asia/Kathmandu -- "${text[@]}"
        setting "no home" -u HOME -- "${text[@]}"
        setting "a home that does not exist" HOME=/nonexistent -- "${text[@]}"
        setting "temporary files with spaces" TMPDIR="$home/with spaces ü" -- "${text[@]}"
        usual=$(umask)
        umask 077
        setting "umask 077" -- "${text[@]}"
        umask "$usual"
        clone="$home/clone ü"
        git clone --quiet . "$clone"
        pushd "$clone" >/dev/null
        setting "a path with spaces" PYTHONPATH="$clone" -- "${text[@]}"
        popd >/dev/null
        ;;
    orders)
        for seed in 1 2 3; do setting "order $seed" PYTHONHASHSEED=$seed -- "${numeric[@]}" "${text[@]}" --randomly-seed=$seed; done
        ;;
    *) echo "no such part: $part (plain, numeric, threads, text, orders)" >&2; exit 2 ;;
    esac
done
[ ${#failed[@]} -eq 0 ] || { printf 'failed: %s\n' "${failed[@]}" >&2; exit 1; }
