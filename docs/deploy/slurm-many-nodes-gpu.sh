#!/bin/bash
# Two nodes with four GPUs each, a rank for each GPU. In the directory of train.py, which all nodes see:
# sbatch slurm-many-nodes-gpu.sh
#SBATCH --job-name=train
#SBATCH --output=%x-%j.out
#SBATCH --time=01:00:00
#SBATCH --nodes=2
#SBATCH --ntasks=8
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --mem=128G
#SBATCH --gpus-per-node=4
set -euo pipefail
source .venv/bin/activate

# Every rank sees all GPUs of its node. MPIStrategy or init() gives each rank one of them. So no --gpus-per-task,
# which would hide the other GPUs from NCCL.
# For --mpi and --cpus-per-task see slurm-many-nodes-cpu.sh.
srun --mpi=pmix --cpus-per-task="$SLURM_CPUS_PER_TASK" --cpu-bind=cores --kill-on-bad-exit=1 python train.py
