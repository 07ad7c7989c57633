#!/bin/bash
# Four nodes with four ranks each; the job goes on when nodes are lost, and is queued again before its time is over.
# In the directory of train.py, which all nodes see: sbatch slurm-elastic-cpu.sh
#SBATCH --job-name=train
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --time=24:00:00
#SBATCH --nodes=4
#SBATCH --ntasks=16
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
# Slurm ends a job whose node fails, unless it is told not to.
#SBATCH --no-kill
# A preempted job is queued again. So is this one, two minutes before its time is over (B: the signal is for this shell).
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
set -uo pipefail
source .venv/bin/activate

mpistrat run --elastic -np "$SLURM_NTASKS" --elastic-checkpoint checkpoints python train.py &
supervisor=$!
# The ranks end at their next commit, which the chief saves. The exit code is 75 then.
trap 'kill -TERM $supervisor' TERM
wait $supervisor
code=$?
# `wait` also ends when the signal arrives.
if kill -0 $supervisor 2> /dev/null; then wait $supervisor; code=$?; fi
[ $code = 75 ] && scontrol requeue "$SLURM_JOB_ID"
exit $code
