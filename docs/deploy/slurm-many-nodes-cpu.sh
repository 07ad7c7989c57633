#!/bin/bash
# Four nodes, four ranks on each with eight cores each. In the directory of train.py, which all nodes see:
# sbatch slurm-many-nodes-cpu.sh
#SBATCH --job-name=train
#SBATCH --output=%x-%j.out
#SBATCH --time=01:00:00
#SBATCH --nodes=4
#SBATCH --ntasks=16
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --mem-per-cpu=2G
set -euo pipefail
source .venv/bin/activate

# pmix is for Open MPI; pmi2 is for MPICH; `srun --mpi=list` prints what this Slurm has. Since Slurm 22.05 srun does not
# take the number of cores from the lines above. TensorFlow has a thread for each core that srun binds the rank to.
# Without a PMI that fits, this line works too: mpistrat run -np "$SLURM_NTASKS" python train.py
srun --mpi=pmix --cpus-per-task="$SLURM_CPUS_PER_TASK" --cpu-bind=cores --kill-on-bad-exit=1 python train.py
