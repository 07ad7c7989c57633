"""Every example as its user starts it: plain python, and under mpirun with 2 and with 3 ranks."""

import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from ..support.jobs import ROOT, Finished, needs_mpirun, run_job, run_limited

EXAMPLES = ["keras_digits", "custom_loop_digits"]
LIMIT_S = 300.0
LAST_LINE = re.compile(r"test accuracy (\d\.\d{3}), \d+\.\d s, weights ([0-9a-f]{64}), the same on all ranks \((\d+)\)")
# Each rank runs in a directory of its own and writes its stdout there, so that a test sees which rank wrote what.
IN_OWN_DIRECTORY = 'cd "$0/rank${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}}" && exec "$@" > stdout'
DIGEST_OF_CHECKPOINT = """
import hashlib, keras, sys
weights = keras.models.load_model("digits.keras").get_weights()
assert "mpistrat" not in sys.modules
print(hashlib.sha256(b"".join(weight.tobytes() for weight in weights)).hexdigest())
"""
# What makes the ranks' weights equal in each example; any other callback or call can stand in its place.
BROADCASTS = {
    "keras_digits": "hvd.callbacks.BroadcastGlobalVariablesCallback(0)",
    "custom_loop_digits": "hvd.broadcast_variables(model.weights + optimizer.variables, root_rank=0)",
}

each_example = pytest.mark.parametrize("example", EXAMPLES)
each_run = pytest.mark.parametrize("example, ranks", [
    *((example, 1) for example in EXAMPLES), *(pytest.param(example, 2, marks=needs_mpirun) for example in EXAMPLES),
    pytest.param("custom_loop_digits", 3, marks=needs_mpirun)])


@dataclass(frozen=True)
class Run:
    """A finished run of a script; `directories[r]` is where rank r ran, and `job.output` what all wrote to stderr."""

    job: Finished
    directories: list[Path]

    def stdout(self, rank: int) -> str:
        return (self.directories[rank] / "stdout").read_text()

    def last_line(self) -> re.Match[str]:
        """The chief's last line, taken apart."""
        assert self.job.code == 0, self.job.output
        line = self.stdout(0).splitlines()[-1]
        match = LAST_LINE.fullmatch(line)
        assert match is not None, line
        return match


def run(script: Path, ranks: int, base: Path, arguments: Sequence[str] = (), env: dict[str, str] | None = None) -> Run:
    directories = [base / f"rank{rank}" for rank in range(ranks)]
    for directory in directories:
        directory.mkdir(exist_ok=True)
    command = ["sh", "-c", IN_OWN_DIRECTORY, str(base), sys.executable, str(script), *arguments]
    job = run_limited(command, env=env, limit_s=LIMIT_S) if ranks == 1 else \
        run_job(ranks, command, env=env, limit_s=LIMIT_S)
    return Run(job, directories)


def path_of(example: str) -> Path:
    return ROOT / "examples" / f"{example}.py"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Run]:
    """Trains an example on the digits with a checkpoint, once for all tests that ask for the same."""
    runs: dict[tuple[str, int], Run] = {}

    def train(example: str, ranks: int) -> Run:
        if (example, ranks) not in runs:
            base = tmp_path_factory.mktemp(example)
            runs[example, ranks] = run(path_of(example), ranks, base, ["--checkpoint", "digits.keras"])
        return runs[example, ranks]

    return train


@pytest.fixture(scope="module")
def mnist_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file in the layout of Keras' mnist.npz. The digit says where an image is bright; half the test labels lie."""
    random = np.random.default_rng(3)
    labels = np.arange(240, dtype=np.uint8) % 10
    images = random.integers(0, 50, (len(labels), 28, 28), dtype=np.uint8)
    for image, label in zip(images, labels):
        row, column = divmod(int(label), 4)
        image[9 * row:9 * row + 7, 7 * column:7 * column + 7] += 200
    y_test = labels[200:].copy()
    y_test[::2] = (y_test[::2] + 1) % 10
    path = tmp_path_factory.mktemp("data") / "some.npz"
    np.savez(path, x_train=images[:200], y_train=labels[:200], x_test=images[200:], y_test=y_test)
    return path


@pytest.mark.quick
@each_run
def test_reaches_the_accuracy_and_says_so_in_its_last_line(example: str, ranks: int,
                                                           trained: Callable[[str, int], Run]) -> None:
    line = trained(example, ranks).last_line()
    assert float(line[1]) >= 0.97, line[0]
    assert int(line[3]) == ranks


@each_run
def test_only_the_chief_shows_progress(example: str, ranks: int, trained: Callable[[str, int], Run]) -> None:
    finished = trained(example, ranks)
    assert re.search(r"^epoch 1/\d+", finished.stdout(0), re.MULTILINE | re.IGNORECASE)
    assert [finished.stdout(rank) for rank in range(1, ranks)] == [""] * (ranks - 1)


@each_run
def test_only_the_chief_writes_a_checkpoint(example: str, ranks: int, trained: Callable[[str, int], Run]) -> None:
    written = [(directory / "digits.keras").exists() for directory in trained(example, ranks).directories]
    assert written == [True] + [False] * (ranks - 1)


@pytest.mark.horovod("optimizer-class")
@needs_mpirun
@each_example
def test_the_checkpoint_has_the_weights_of_the_last_line_and_loads_without_mpistrat(
        example: str, trained: Callable[[str, int], Run]) -> None:
    finished = trained(example, 2)
    loading = run_limited(["sh", "-c", 'cd "$0" && exec "$@"', str(finished.directories[0]), sys.executable, "-c",
                           DIGEST_OF_CHECKPOINT], limit_s=LIMIT_S)
    assert loading.code == 0, loading.output
    assert loading.output.splitlines()[-1] == finished.last_line()[2]


@needs_mpirun
@each_example
def test_weights_that_differ_among_the_ranks_are_an_error(example: str, tmp_path: Path) -> None:
    text = path_of(example).read_text()
    without = text.replace(BROADCASTS[example], "keras.callbacks.Callback()")
    assert without != text
    script = tmp_path / "without_broadcast.py"
    script.write_text(without)
    # Without mpistrat's own check of the first steps, which ends the job before that of the example.
    finished = run(script, 2, tmp_path, ["--epochs", "1"], env={"MPISTRAT_CONSISTENCY_CHECK_DISABLE": "1"})
    assert finished.job.code != 0
    ends = [line for line in finished.job.output.splitlines() if line.startswith("The ranks have ended with different")]
    assert len(ends) == 2, finished.job.output
    assert "test accuracy" not in finished.stdout(0)


@needs_mpirun
@each_example
def test_data_takes_a_file_in_the_layout_of_mnist(example: str, mnist_file: Path, tmp_path: Path) -> None:
    finished = run(path_of(example), 2, tmp_path, ["--data", str(mnist_file), "--epochs", "8", "--batch-size", "10"])
    assert finished.last_line()[1] == "0.500", "half of the test labels in the file are wrong, and the others easy"


@needs_mpirun
@each_example
def test_every_rank_names_a_data_file_that_is_missing(example: str, tmp_path: Path) -> None:
    path = tmp_path / "nowhere.npz"
    job = run(path_of(example), 3, tmp_path, ["--data", str(path)]).job
    assert job.code != 0
    assert job.output.count(f"--data {path} cannot be read as an .npz file") == 3, job.output
    assert "Traceback" not in job.output


@each_example
def test_a_data_file_of_another_kind_is_named(example: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", images=np.zeros(3))
    job = run(path_of(example), 1, tmp_path, ["--data", str(tmp_path / "other.npz")]).job
    assert job.code != 0
    assert "in the layout of Keras' mnist: 'x_train is not a file in the archive'" in job.output.splitlines()[-1]
    assert "Traceback" not in job.output


@needs_mpirun
@each_example
def test_a_data_file_that_one_rank_lacks_ends_the_job(example: str, mnist_file: Path, tmp_path: Path) -> None:
    (tmp_path / "rank0").mkdir()
    (tmp_path / "rank0" / "own.npz").write_bytes(mnist_file.read_bytes())
    finished = run(path_of(example), 2, tmp_path, ["--data", "own.npz"])
    assert finished.job.code != 0
    # Rank 1 prints it, and again in the line on why it ends the job.
    said = [line for line in finished.job.output.splitlines() if line.startswith("--data own.npz cannot be read")]
    assert len(said) == 1, finished.job.output
    assert "have already shut down" in finished.job.output, "rank 0 is told why it cannot go on"
    assert "test accuracy" not in finished.stdout(0)


@each_example
def test_a_data_file_with_fewer_images_than_ranks_is_an_error(example: str, tmp_path: Path) -> None:
    images, labels = np.zeros((0, 28, 28), np.uint8), np.zeros(0, np.uint8)
    np.savez(tmp_path / "few.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    job = run(path_of(example), 1, tmp_path, ["--data", str(tmp_path / "few.npz")]).job
    assert job.code != 0
    assert job.output.splitlines()[-1] == "0 training images are too few for 1 ranks"


@pytest.mark.quick
@each_example
def test_without_scikit_learn_the_pip_line_is_named(example: str, tmp_path: Path) -> None:
    broken = tmp_path / "sklearn"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('not installed')")
    job = run(path_of(example), 1, tmp_path, env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}).job
    assert job.code != 0
    assert "pip install scikit-learn" in job.output.splitlines()[-1], job.output
    assert "Traceback" not in job.output
