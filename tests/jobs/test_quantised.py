"""8-bit numbers between hosts: trainings come as far with them as without."""

import json

import pytest

from ..support.jobs import needs_mpirun, run_job


@pytest.mark.nightly
@needs_mpirun
def test_three_models_learn_as_well_with_8_bit_numbers_between_hosts() -> None:
    job = run_job(4, ["python", "tests/scripts/quantised_convergence.py"], limit_s=400)
    assert job.code == 0, job.output
    models = [json.loads(line) for line in job.output.splitlines() if line.startswith('{"model"')]
    assert [model["model"] for model in models] == ["dense", "convolutional", "text"], job.output
    for model in models:
        print(model)
        assert model["none"] < 0.7  # It has learned: chance is 2.08.
        assert abs(model["int8"] - model["none"]) < 0.1 * model["none"] + 0.01, model
