"""Chunks in shared memory whose bytes change all the time in a job."""

import pytest

from ..support.jobs import run_job

# Chunks so small that small models have several, and a choice that is made again at every step.
ALWAYS_TRYING = ["SHM_CHUNK_BYTES=4096", "SHM_LARGER_CHUNKS=(8192,32768)", "SHM_CHOICE_BYTES=1", "CHUNK_KEPT_LEAST=9",
                 "CHUNK_KEPT_MOST=9"]


@pytest.mark.nightly
def test_training_has_the_same_bits_whatever_the_bytes_of_the_chunks() -> None:
    job = run_job(2, ["python", "-m", "tests.tuned", *ALWAYS_TRYING, "tests/programs/random_scripts.py", "3", "7"],
                  env={"TF_NUM_INTEROP_THREADS": "1"}, limit_s=300)
    assert job.output.count("3 of 3 scripts are right") == 2, job.output
    assert job.code == 0, job.output
