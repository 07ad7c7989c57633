"""examples/resnet50.py on tiny images: made-up ones, and files in ImageNet's layout."""

import re
from pathlib import Path

import numpy as np
import pytest

from ..support.jobs import Finished, needs_mpirun, run_job

QUICK = ["--image-size", "32", "--batch-size", "2", "--epochs", "2", "--warmup-epochs", "2", "--steps-per-epoch", "2",
         "--validation-steps", "1", "--classes", "3"]
LAST_LINE = re.compile(r"training loss (\d+\.\d+), validation accuracy \d\.\d+, learning rate (\d\.\d+), (\d) ranks")


def trained(*arguments: str, ranks: int = 2) -> Finished:
    return run_job(ranks, ["python", "examples/resnet50.py", *QUICK, *arguments], limit_s=300)


def last_line(job: Finished) -> re.Match[str]:
    assert job.code == 0, job.output
    found = [match for line in job.output.splitlines() if (match := LAST_LINE.fullmatch(line))]
    assert len(found) == 1, job.output
    return found[0]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Two files for training and two for validation, each with three noisy images of one of three colours."""
    tf = pytest.importorskip("tensorflow")
    random = np.random.default_rng(0)
    for split in ("train", "validation"):
        for number in range(2):
            with tf.io.TFRecordWriter(str(tmp_path / f"{split}-{number:05}-of-00002")) as writer:
                for label in (1, 2, 3):
                    image = random.integers(0, 60, (48, 40, 3), dtype=np.uint8)
                    image[..., label - 1] += 150
                    features = {
                        "image/encoded": tf.train.Feature(bytes_list=tf.train.BytesList(
                            value=[tf.io.encode_jpeg(image).numpy()])),
                        "image/class/label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label]))}
                    writer.write(tf.train.Example(
                        features=tf.train.Features(feature=features)).SerializeToString())
    return tmp_path


@needs_mpirun
def test_made_up_images_in_mixed_precision_reach_the_rate_of_the_warm_up() -> None:
    line = last_line(trained("--synthetic", "--mixed-precision", "bfloat16", "--learning-rate", "0.64"))
    assert float(line[2]) == pytest.approx(0.64 * 4 / 256, abs=1e-5)
    assert int(line[3]) == 2


@needs_mpirun
def test_each_rank_trains_on_files_of_its_own(files: Path) -> None:
    assert int(last_line(trained("--data", str(files)))[3]) == 2


@needs_mpirun
def test_fewer_files_than_ranks_are_an_error(files: Path) -> None:
    job = trained("--data", str(files), ranks=3)
    assert job.code != 0
    assert f"{files} has 2 files train-*, which are too few for 3 ranks" in job.output, job.output
