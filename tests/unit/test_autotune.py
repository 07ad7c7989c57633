"""The search for the quickest way to reduce."""

import json

import pytest

from mpistrat.core.tuning import AUTOTUNE_LEAST_BYTES as LEAST_BYTES
from mpistrat.core.tuning import AUTOTUNE_SAMPLE_ROUNDS as SAMPLES
from mpistrat.core.tuning import AUTOTUNE_WARM_UP_ROUNDS as WARM_UP
from mpistrat.engine.autotune import Autotuner, read_report

KNOBS = {"backend": ("shared_memory", "mpi"), "chunk": (512, 64, 128)}


def search(tuner: Autotuner, rate: dict) -> dict:
    """Let it try until it is done, with rounds that are as fast as `rate` says; returns what was used at the end."""
    used = {name: values[0] for name, values in tuner.knobs.items()}
    for _ in range(10_000):
        if tuner.is_done:
            return used
        seconds = LEAST_BYTES / (rate[used["backend"]] * rate[used["chunk"]])
        used = tuner.record(LEAST_BYTES, seconds) or used
    raise AssertionError("the search does not end")


@pytest.mark.parametrize("backend", KNOBS["backend"])
@pytest.mark.parametrize("chunk", KNOBS["chunk"])
def test_the_quickest_is_kept(backend: str, chunk: int) -> None:
    rate = {"shared_memory": 1.0, "mpi": 1.0, 512: 1.0, 64: 1.0, 128: 1.0}
    rate[backend], rate[chunk] = 3.0, 2.0
    tuner = Autotuner(KNOBS)
    assert search(tuner, rate) == tuner.best == {"backend": backend, "chunk": chunk}
    assert tuner.gain == pytest.approx((3 if backend == "mpi" else 1) * (1 if chunk == 512 else 2))


def test_every_choice_is_tried_for_as_many_rounds() -> None:
    tuner = Autotuner(KNOBS)
    rounds = 0
    while not tuner.is_done:
        tuner.record(LEAST_BYTES, 1.0)
        rounds += 1
    assert len(tuner.tried) == 4
    assert rounds == 4 * (WARM_UP + SAMPLES)


def test_small_rounds_do_not_count() -> None:
    tuner = Autotuner(KNOBS)
    for _ in range(1000):
        assert tuner.record(LEAST_BYTES - 1, 1.0) is None
    assert not tuner.tried


def test_the_rounds_after_a_change_do_not_count() -> None:
    tuner = Autotuner({"chunk": (1, 2)})
    for i in range(2 * (WARM_UP + SAMPLES)):
        tuner.record(LEAST_BYTES, 100.0 if i % (WARM_UP + SAMPLES) < WARM_UP else 1.0)
    assert [rate for _, rate in tuner.tried] == [LEAST_BYTES, LEAST_BYTES]


def test_what_is_hardly_quicker_is_left_alone() -> None:
    tuner = Autotuner(KNOBS)
    assert search(tuner, {"shared_memory": 1.0, "mpi": 1.04, 512: 1.0, 64: 1.03, 128: 1.0}) == tuner.first
    assert tuner.gain == 1.0


def test_with_nothing_to_choose_there_is_no_search() -> None:
    tuner = Autotuner({"backend": ("mpi",)})
    assert tuner.is_done
    assert tuner.best == {"backend": "mpi"}
    assert tuner.gain == 1.0


def test_a_later_run_reads_what_was_chosen() -> None:
    tuner = Autotuner(KNOBS)
    search(tuner, {"shared_memory": 1.0, "mpi": 2.0, 512: 1.0, 64: 3.0, 128: 1.0})
    assert json.loads(tuner.report())["gain"] == 6.0
    assert read_report(tuner.report(), KNOBS) == {"backend": "mpi", "chunk": 64}


@pytest.mark.parametrize(("text", "what"), [
    ("", "not a log of autotune"), ("[]", "not a log of autotune"), ("{}", "not a log of autotune"),
    ('{"best": {"backend": "mpi", "chunk": 7}}', "it was made for other ranks or hosts"),
    ('{"best": {"backend": "mpi"}}', "it was made for other ranks or hosts")])
def test_a_log_that_does_not_fit_is_refused(text: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        read_report(text, KNOBS)
