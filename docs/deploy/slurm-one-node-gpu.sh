#!/bin/bash
# One node with four GPUs, a rank for each. In the directory of train.py: sbatch slurm-one-node-gpu.sh
#SBATCH --job-name=train
#SBATCH --output=%x-%j.out
#SBATCH --time=01:00:00
#SBATCH --nodes=1
#SBATCH --ntasks=4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --mem=128G
#SBATCH --gpus-per-node=4
set -euo pipefail
source .venv/bin/activate

# Every rank sees all GPUs of the node. MPIStrategy or init() gives each rank one of them.
export TF_NUM_INTRAOP_THREADS="$SLURM_CPUS_PER_TASK"
mpistrat run -np "$SLURM_NTASKS" python train.py
