#!/bin/bash
# One node, four ranks with eight cores each. In the directory of train.py: sbatch slurm-one-node-cpu.sh
#SBATCH --job-name=train
#SBATCH --output=%x-%j.out
#SBATCH --time=01:00:00
#SBATCH --nodes=1
#SBATCH --ntasks=4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --mem-per-cpu=2G
set -euo pipefail
source .venv/bin/activate

# Each rank takes an equal share of the cores of the allocation, and has as many threads.
mpistrat run -np "$SLURM_NTASKS" python train.py
