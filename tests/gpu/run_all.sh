#!/usr/bin/env bash
# Everything that needs a GPU, in two calls of at most ten minutes:
#   run_all.sh          the tests, the sibling benchmark, the benchmark under MPS
#   run_all.sh order    turns on the device in every way of ordering, and the same under a private MPS daemon
# Needs python3 with torch >= 2.11, torchvision, timm, scikit-learn, rich and pytest; root for the shaped link; no network.
# Results, some 100 KB, go to $OUT (default runs/gpu): tests.log, siblings_gpu.json, siblings_gpu.log, and the same with mps.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-runs/gpu}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$OUT"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

# The plugins that pyproject.toml asks for are for CPU tests and benchmarks; here they are used if they are there.
options=(-o required_plugins= -o addopts= -ra --strict-markers --tb=short --durations=15)
"$PYTHON" -c 'import pytest_timeout' 2>/dev/null && options+=(--timeout=150)
"$PYTHON" -c 'import pytest_benchmark' 2>/dev/null && options+=(--benchmark-disable)

{
    date -u +%FT%TZ
    nvidia-smi --query-gpu=name,uuid,driver_version,compute_mode,mig.mode.current --format=csv
    "$PYTHON" -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda, "NCCL", torch.cuda.nccl.version())'
    command -v ip tc nvidia-cuda-mps-control gcc
} 2>&1 | tee "$OUT/tests.log"

order() { # name of the log, seconds
    timeout -k 10 "$2" "$PYTHON" -m pytest "${options[@]}" -p no:cacheprovider \
        tests/gpu/test_device_ways.py tests/gpu/test_device_order.py 2>&1 | tee "$OUT/$1.log"
    return "${PIPESTATUS[0]}"
}

if [ "${1:-all}" = order ]; then
    order order 300
    status=$?
    if ! command -v nvidia-cuda-mps-control >/dev/null; then
        echo "not run under MPS: no nvidia-cuda-mps-control here; install NVIDIA's MPS" | tee "$OUT/order_mps.log"
        exit "$status"
    fi
    mkdir "$work/mps"
    export CUDA_MPS_PIPE_DIRECTORY="$work/mps" CUDA_MPS_LOG_DIRECTORY="$work/mps"
    if ! nvidia-cuda-mps-control -d; then
        echo "not run under MPS: the daemon does not start here" | tee "$OUT/order_mps.log"
        exit "$status"
    fi
    trap 'echo quit | nvidia-cuda-mps-control; rm -rf "$work"' EXIT
    order order_mps 240
    mps=$?
    exit "$((status ? status : mps))"
fi

# The order in which a cut-off hurts least. Semaphores, the second way, are left to `order`.
timeout -k 10 250 "$PYTHON" -m pytest "${options[@]}" -p no:cacheprovider -k "not semaphores" \
    tests/gpu/test_kernels.py tests/gpu/test_device_order.py tests/gpu/test_collectives_gpu.py tests/gpu/test_hooks_gpu.py \
    2>&1 | tee -a "$OUT/tests.log"
status=${PIPESTATUS[0]}
timeout -k 10 100 "$PYTHON" -m pytest "${options[@]}" -p no:cacheprovider tests/gpu/test_kfac_gpu.py \
    2>&1 | tee -a "$OUT/tests.log"
kfac=${PIPESTATUS[0]}

benchmark() { # name, seconds, arguments
    local name=$1 limit_s=$2
    shift 2
    timeout -k 10 "$limit_s" "$PYTHON" recipes/siblings_gpu.py --out "$work/$name" "$@" 2>&1 | tee "$OUT/$name.log"
    # A rank that ended early says why in its own log.
    tail -n 20 "$work/$name"/*/*/*/rank*.log >"$OUT/$name.ranks.log" 2>/dev/null
    cp "$work/$name/siblings_gpu.json" "$OUT/$name.json"
}

benchmark siblings_gpu 145
benchmark siblings_gpu_mps 70 --mps only --setup gloo --preset convnet --repeats 2
exit "$((status ? status : kfac))"
