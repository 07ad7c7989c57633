"""The first two examples as their user starts them: plain python, and under mpirun with 2 and with 3 ranks."""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ..support.jobs import ROOT, needs_mpirun, run_job, run_limited
from ..support.mnist_file import in_the_layout_of_mnist
from ..support.scripts import Line, Ran

EXAMPLES = ["keras_digits", "custom_loop_digits"]
LIMIT_S = 300.0
IN_OWN_DIRECTORY = 'cd "$0/rank${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}}" && exec "$@"'
LAST_LINE = re.compile(r"test accuracy (\d\.\d{3}), \d+\.\d s, weights ([0-9a-f]{64}), the same on all ranks \((\d+)\)")
DIGEST_OF_CHECKPOINT = """
import hashlib, keras, sys
for path in sys.argv[1:]:
    weights = keras.models.load_model(path).get_weights()
    assert "mpistrat" not in sys.modules
    print(hashlib.sha256(b"".join(weight.tobytes() for weight in weights)).hexdigest())
"""


def path_of(example: str) -> str:
    """The absolute path of an example."""
    return str(ROOT / "examples" / f"{example}.py")


def line(example: str, ranks: int, arguments: str) -> Line:
    """An example with arguments."""
    return Line(ranks, f"examples/{example}.py {arguments}")


def training(example: str, ranks: int) -> Line:
    """An example that trains on the digits with a checkpoint, whose path differs by rank."""
    return line(example, ranks, f"--checkpoint {example}.{ranks}.{{rank}}.keras")


def with_files(ranks: int, *lines: Line) -> tuple[Line, ...]:
    """Lines that need the files which a script writes before."""
    return Line(ranks, "tests/scripts/example_files.py"), *lines


def each(make: Callable[[str], Line | tuple[Line, ...]]) -> pytest.MarkDecorator:
    """A test of each example."""
    return pytest.mark.parametrize("needed", [make(example) for example in EXAMPLES], ids=EXAMPLES)


each_run = pytest.mark.parametrize("needed", [
    *(training(example, 1) for example in EXAMPLES),
    *(pytest.param(training(example, 2), marks=needs_mpirun) for example in EXAMPLES),
    pytest.param(training("custom_loop_digits", 3), marks=needs_mpirun)], ids=str)


def last_line(ran: Ran) -> re.Match[str]:
    """The chief's last line, taken apart."""
    match = LAST_LINE.fullmatch(ran.well.splitlines()[-1])
    assert match is not None, ran
    return match


@each_run
def test_reaches_the_accuracy_and_says_so_in_its_last_line(needed: Line, ran: Callable[[Line], Ran]) -> None:
    said = last_line(ran(needed))
    assert float(said[1]) >= 0.97, said[0]
    assert int(said[3]) == needed.ranks


@pytest.mark.nightly
@each_run
def test_only_the_chief_shows_progress(needed: Line, ran: Callable[[Line], Ran]) -> None:
    chief, *others = ran(needed).output
    assert re.search(r"^epoch 1/\d+", chief, re.MULTILINE | re.IGNORECASE)
    assert others == [""] * (needed.ranks - 1)


@pytest.mark.nightly
@each_run
def test_only_the_chief_writes_a_checkpoint(needed: Line, ran: Callable[[Line], Ran]) -> None:
    name = needed.words.split()[-1]
    written = [(ran(needed).directory / name.format(rank=rank)).exists() for rank in range(needed.ranks)]
    assert written == [True] + [False] * (needed.ranks - 1)


@pytest.mark.nightly
@pytest.mark.horovod("optimizer-class")
@needs_mpirun
@pytest.mark.parametrize("needed", [tuple(training(example, 2) for example in EXAMPLES)], ids=["both"])
def test_the_checkpoints_have_the_weights_of_the_last_lines_and_load_without_mpistrat(
        needed: tuple[Line, ...], ran: Callable[[Line], Ran]) -> None:
    paths = [str(ran(each).directory / each.words.split()[-1].format(rank=0)) for each in needed]
    loading = run_limited([sys.executable, "-c", DIGEST_OF_CHECKPOINT, *paths], limit_s=LIMIT_S)
    assert loading.code == 0, loading.output
    assert loading.output.splitlines()[-2:] == [last_line(ran(each))[2] for each in needed]


# Without mpistrat's own check of the first steps, which ends the job before that of the example.
@pytest.mark.nightly
@needs_mpirun
@each(lambda example: with_files(
    2, Line(2, f"MPISTRAT_CHECK_ACTION=off {example}_alone.py --epochs 1")))
def test_weights_that_differ_among_the_ranks_are_an_error(needed: tuple[Line, ...], ran: Callable[[Line], Ran]) -> None:
    ending = ran(needed[-1])
    assert all(error.startswith("The ranks have ended with different weights") for error in ending.error), ending
    assert "test accuracy" not in ending.output[0]


@pytest.mark.nightly
@needs_mpirun
@each(lambda example: with_files(2, line(example, 2, "--data mnist.npz --epochs 8 --batch-size 10")))
def test_data_takes_a_file_in_the_layout_of_mnist(needed: tuple[Line, ...], ran: Callable[[Line], Ran]) -> None:
    assert last_line(ran(needed[-1]))[1] == "0.500", "half of the test labels are wrong, and the others easy"


@pytest.mark.nightly
@needs_mpirun
@each(lambda example: line(example, 3, "--data nowhere.npz"))
def test_every_rank_names_a_data_file_that_is_missing(needed: Line, ran: Callable[[Line], Ran]) -> None:
    for error in ran(needed).error:
        assert error.startswith("--data nowhere.npz cannot be read as an .npz file"), error


@pytest.mark.nightly
@each(lambda example: with_files(1, line(example, 1, "--data other.npz")))
def test_a_data_file_of_another_kind_is_named(needed: tuple[Line, ...], ran: Callable[[Line], Ran]) -> None:
    error, = ran(needed[-1]).error
    assert "in the layout of Keras' mnist: 'x_train is not a file in the archive'" in error


@pytest.mark.nightly
@each(lambda example: with_files(1, line(example, 1, "--data few.npz")))
def test_a_data_file_with_fewer_images_than_ranks_is_an_error(needed: tuple[Line, ...],
                                                              ran: Callable[[Line], Ran]) -> None:
    assert ran(needed[-1]).error == ("0 training images are too few for 1 ranks",)


@pytest.mark.nightly
@needs_mpirun
@pytest.mark.parametrize("example", EXAMPLES)
def test_a_data_file_that_one_rank_lacks_ends_the_job(example: str, tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"rank{rank}").mkdir()
    np.savez(tmp_path / "rank0" / "own.npz", **in_the_layout_of_mnist())
    job = run_job(2, ["sh", "-c", IN_OWN_DIRECTORY, str(tmp_path), sys.executable, path_of(example), "--data",
                      "own.npz"], limit_s=LIMIT_S)
    assert job.code != 0
    # Rank 1 prints it, and again in the line on why it ends the job.
    said = [line for line in job.output.splitlines() if line.startswith("--data own.npz cannot be read")]
    assert len(said) == 1, job.output
    assert "have already shut down" in job.output, "rank 0 is told why it cannot go on"
    assert "test accuracy" not in job.output


@pytest.mark.nightly
@pytest.mark.parametrize("example", EXAMPLES)
def test_without_scikit_learn_the_pip_line_is_named(example: str, tmp_path: Path) -> None:
    broken = tmp_path / "sklearn"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('not installed')")
    job = run_limited([sys.executable, path_of(example)], env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})
    assert job.code != 0
    assert "pip install scikit-learn" in job.output.splitlines()[-1], job.output
    assert "Traceback" not in job.output
