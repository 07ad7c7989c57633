"""TensorFlow's tutorials on distributed training, with MPIStrategy in the place of their strategy, under mpirun."""

import re
from collections.abc import Callable

import pytest

from ..support.jobs import needs_mpirun
from ..support.scripts import Line, Ran

pytestmark = needs_mpirun


def tutorial(words: str) -> pytest.MarkDecorator:
    """A test of a tutorial on two ranks, with a directory."""
    return pytest.mark.parametrize("needed", [Line(2, f"tests/tutorials/{words}")], ids=str)


@pytest.mark.nightly
@tutorial("multi_worker_with_keras.py with_keras/")
def test_multi_worker_training_with_keras(needed: Line, ran: Callable[[Line], Ran]) -> None:
    line = ran(needed).well.splitlines()[-1]
    match = re.fullmatch(r"2 workers, accuracy ([\d.]+), restored ([\d.]+), losses ([\d. ]+), "
                         r"3 epochs with backups, kept (.*)", line)
    assert match, line
    assert match[1] == match[2] and float(match[2]) > 0.6
    # Each is the mean over an epoch: four from fit, two from going on with what was restored.
    losses = [float(loss) for loss in match[3].split()]
    assert len(losses) == 6 and losses == sorted(losses, reverse=True), losses
    assert "model.keras" in match[4] and "ckpt" in match[4]


@pytest.mark.nightly
@pytest.mark.parametrize("needed", [tuple(Line(2, f"tests/tutorials/multi_worker_loop.py loop/ {epochs}")
                                          for epochs in (2, 4))], ids=["both"])
def test_a_multi_worker_loop_that_is_interrupted_and_goes_on(needed: tuple[Line, ...],
                                                             ran: Callable[[Line], Ran]) -> None:
    first, second = (ran(line).well.splitlines()[-1] for line in needed)
    assert re.match(r"epochs 0 to 2, .* 2 workers", first), first
    match = re.fullmatch(r"epochs 2 to 4, loss [\d.]+, accuracy ([\d.]+), 2 workers", second)
    assert match, second
    assert float(match[1]) > 0.85


@pytest.mark.nightly
@tutorial("custom_training.py custom/")
def test_custom_training(needed: Line, ran: Callable[[Line], Ran]) -> None:
    line = ran(needed).well.splitlines()[-1]
    match = re.fullmatch(r"2 replicas, test accuracy ([\d.]+), restored ([\d.]+), losses ([\d.]+) ([\d.]+) ([\d.]+)",
                         line)
    assert match, line
    assert match[1] == match[2]
    assert float(match[1]) > 0.85
    assert float(match[3]) > float(match[4]) > float(match[5])
