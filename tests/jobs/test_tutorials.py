"""TensorFlow's tutorials on distributed training, with MPIStrategy in the place of their strategy, under mpirun."""

import re
from pathlib import Path

from ..support.jobs import needs_mpirun, run_job

RANKS = 2


def last_line(tutorial: str, *arguments: object) -> str:
    """What the chief prints at the end."""
    job = run_job(RANKS, ["python", f"tests/tutorials/{tutorial}.py", *map(str, arguments)], limit_s=300)
    assert job.code == 0, job.output
    return job.output.splitlines()[-1]


@needs_mpirun
def test_multi_worker_training_with_keras(tmp_path: Path) -> None:
    line = last_line("multi_worker_with_keras", tmp_path)
    match = re.fullmatch(r"2 workers, accuracy ([\d.]+), restored ([\d.]+), losses ([\d. ]+), "
                         r"3 epochs with backups, kept (.*)", line)
    assert match, line
    assert match[1] == match[2] and float(match[2]) > 0.6
    # Each is the mean over an epoch: four from fit, two from going on with what was restored.
    losses = [float(loss) for loss in match[3].split()]
    assert len(losses) == 6 and losses == sorted(losses, reverse=True), losses
    assert "model.keras" in match[4] and "ckpt" in match[4]


@needs_mpirun
def test_a_multi_worker_loop_that_is_interrupted_and_goes_on(tmp_path: Path) -> None:
    first = last_line("multi_worker_loop", tmp_path, 2)
    assert re.match(r"epochs 0 to 2, .* 2 workers", first), first
    second = last_line("multi_worker_loop", tmp_path, 4)
    match = re.fullmatch(r"epochs 2 to 4, loss [\d.]+, accuracy ([\d.]+), 2 workers", second)
    assert match, second
    assert float(match[1]) > 0.85


@needs_mpirun
def test_custom_training(tmp_path: Path) -> None:
    line = last_line("custom_training", tmp_path)
    match = re.fullmatch(r"2 replicas, test accuracy ([\d.]+), restored ([\d.]+), losses ([\d.]+) ([\d.]+) ([\d.]+)",
                         line)
    assert match, line
    assert match[1] == match[2]
    assert float(match[1]) > 0.85
    assert float(match[3]) > float(match[4]) > float(match[5])
