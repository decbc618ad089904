#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=04:00:00
#
# Two torchrun jobs as siblings:    sbatch recipes/siblings_slurm.sh train.py --epochs 90
#
# They share one allocation, since Slurm never gives a GPU to two allocations, and may give each one
# its own /dev/shm.
# Over NCCL start MPS on each node first (docs/gpu.md).
set -euo pipefail

export CROSSOVER_GROUP="slurm-$SLURM_JOB_ID" # both jobs have the same group: they are siblings
port=${MASTER_PORT:-29500}
read -r host < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

start() { # NUMBER ARGUMENT...: a step of the allocation on all its nodes
    # --overlap: otherwise a step has its GPUs, cores and memory to itself, and the second one waits.
    srun --overlap --ntasks-per-node=1 --kill-on-bad-exit=1 --output="siblings-$SLURM_JOB_ID-$1.log" \
        torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" \
        --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID-$1" --rdzv-endpoint "$host:$((port + $1))" \
        "${@:2}" &
}

start 1 "$@" --lr 0.1
start 2 "$@" --lr 0.05

status=0
for step in $(jobs -p); do
    wait "$step" || status=$?
done
exit "$status"
