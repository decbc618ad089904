#!/usr/bin/env bash
# All tests and benchmarks that need a GPU, in parts of at most ten minutes each:
#   run_all.sh tests       kernels, exchange, hooks, K-FAC, conformance                (9 minutes)
#   run_all.sh order       turns on the device, without deaths                         (5 minutes)
#   run_all.sh bench       two siblings over gloo, in all ways of sharing; lone jobs   (5 minutes)
#   run_all.sh mps         order and benchmark under a private MPS daemon              (10 minutes)
#   run_all.sh deaths      a sibling killed with kernels in flight, one process a case (7 minutes)
#   run_all.sh deaths-mps  the same under MPS. Run it last: according to MPS's guide, such a death
#                          may harm its server.
# Without an argument: tests, then bench.
# Needs python3 with torch >= 2.11, torchvision, timm, scikit-learn, rich and pytest, and root for the
# shaped link. Needs no network.
# Results, some 100 KB, are written to $OUT (default runs/gpu): a log for each part, siblings*.json.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-runs/gpu}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$OUT"
export PYTHONPATH="$PWD:$PWD/recipes${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

# These tests need none of the plugins in pyproject.toml. pytest-timeout is used if it is installed.
options=(-o required_plugins= -o addopts= -ra --strict-markers --tb=short --durations=15 -p no:cacheprovider)
"$PYTHON" -c 'import pytest_timeout' 2>/dev/null && options+=(--timeout=150)
# Not for `order`, whose output xdist would hide.
beside=()
"$PYTHON" -c 'import xdist' 2>/dev/null && beside=(-n 4)
link=(--rate 10000 --ratio 1)
DEATHS=killed_with_kernels_in_flight
ALONE='(capture or lent or ends_with)' # these must have the GPU to themselves

# SIGINT first: the program then reports its results so far, and ends its processes.
limited() { # seconds, command
    local limit_s=$1
    shift
    timeout -s INT -k 15 "$limit_s" "$@"
}

tests() { # name of the log, seconds, pytest's arguments
    local name=$1 limit_s=$2
    shift 2
    limited "$limit_s" "$PYTHON" -m pytest "${options[@]}" "$@" 2>&1 | tee -a "$OUT/$name.log"
    return "${PIPESTATUS[0]}"
}

deaths() { # name of the log
    local status=0 case cases
    cases=$("$PYTHON" -m pytest "${options[@]}" --collect-only -q -k "$DEATHS" tests/gpu/test_device_order.py | grep '::')
    [ -n "$cases" ] || { echo "no death cases found in tests/gpu/test_device_order.py" | tee -a "$OUT/$1.log"; return 1; }
    while read -r case; do
        tests "$1" 60 "$case" </dev/null || status=1
    done <<<"$cases"
    return "$status"
}

benchmark() { # name, seconds, arguments
    local name=$1 limit_s=$2
    shift 2
    limited "$limit_s" "$PYTHON" tests/gpu/siblings.py --out "$OUT/$name.json" "$@" 2>&1 | tee "$OUT/$name.log"
    return "${PIPESTATUS[0]}"
}

with_mps() { # name of the log; the rest of the script then runs under a private daemon
    if ! command -v nvidia-cuda-mps-control >/dev/null; then
        echo "not run under MPS: no nvidia-cuda-mps-control here; install NVIDIA's MPS" | tee "$OUT/$1.log"
        return 1
    fi
    mkdir "$work/mps"
    export CUDA_MPS_PIPE_DIRECTORY="$work/mps" CUDA_MPS_LOG_DIRECTORY="$work/mps"
    if ! nvidia-cuda-mps-control -d; then
        echo "not run under MPS: the daemon does not start here" | tee "$OUT/$1.log"
        return 1
    fi
    # A daemon whose clients died badly may not answer.
    trap 'echo quit | timeout -k 5 20 nvidia-cuda-mps-control; rm -rf "$work"' EXIT
}

part() {
    local status=0
    case $1 in
    tests)
        tests tests 250 "${beside[@]}" -k "not $DEATHS and not $ALONE" tests/gpu/test_device_order.py tests/gpu/test_hooks_gpu.py || status=1
        tests tests 150 "${beside[@]}" -k cuda tests/conformance/test_conformance.py || status=1
        tests tests 100 "${beside[@]}" tests/gpu/test_kfac_gpu.py || status=1
        ;;
    order)
        tests order 300 -k "not $DEATHS" tests/gpu/test_device_order.py || status=1
        ;;
    bench)
        benchmark siblings 280 "${link[@]}" || status=1
        ;;
    mps)
        with_mps order_mps || return 0
        tests order_mps 240 -k "not $DEATHS" tests/gpu/test_device_order.py || status=1
        benchmark siblings_mps 280 "${link[@]}" || status=1
        benchmark siblings_mps_nccl 280 "${link[@]}" --backend nccl || status=1
        CUDA_DEVICE_MAX_CONNECTIONS=8 benchmark siblings_mps_nccl_queues 280 "${link[@]}" --backend nccl || status=1
        ;;
    deaths) deaths deaths || status=1 ;;
    deaths-mps)
        with_mps deaths_mps || return 0
        deaths deaths_mps || status=1
        ;;
    *)
        echo "unknown part '$1'; expected tests, order, bench, mps, deaths or deaths-mps" >&2
        status=2
        ;;
    esac
    return "$status"
}

{
    date -u +%FT%TZ
    nvidia-smi --query-gpu=name,uuid,driver_version,compute_mode,mig.mode.current --format=csv
    "$PYTHON" -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda, "NCCL", torch.cuda.nccl.version())'
    command -v ip tc nvidia-cuda-mps-control gcc
} 2>&1 | tee "$OUT/machine.log"

status=0
for each in "${@:-tests}"; do
    part "$each" || status=1
done
[ $# -gt 0 ] || part bench || status=1
exit "$status"
