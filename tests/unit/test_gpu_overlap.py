"""How much of the network's time a step hides behind the backward pass, in virtual time."""

from typing import Any

import pytest

from mpistrat.gpu import gpu_executor
from tests.support import virtual_gpu

BACKWARD_S, BUCKETS = 0.065, 4
each_way = pytest.mark.parametrize("way, before", [
    (virtual_gpu.held_back, virtual_gpu.at_once), (virtual_gpu.started_and_awaited, virtual_gpu.one_call)],
    ids=["uncompiled", "compiled"])


@pytest.fixture(autouse=True)
def _without_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_executor, "check_waiting", lambda device, buffer: None)


@each_way
@pytest.mark.parametrize("collective_ms", [5, 10, 20])
def test_a_step_takes_as_long_as_the_longer_of_backward_pass_and_network(way: Any, before: Any,
                                                                        collective_ms: int) -> None:
    last_s = collective_ms / 1000
    found = virtual_gpu.seconds_of(way, last_s)
    assert found < 1.05 * (max(BACKWARD_S, BUCKETS * last_s) + last_s)
    assert found < virtual_gpu.seconds_of(before, last_s) - 2 * last_s


@pytest.mark.parametrize("collective_ms", [0.3, 5, 10, 20])
def test_a_compiled_step_hides_as_much_as_one_that_is_not(collective_ms: float) -> None:
    """So Keras' "auto" may compile whatever share of a step the network takes."""
    compiled, plain = (virtual_gpu.seconds_of(way, collective_ms / 1000)
                       for way in (virtual_gpu.started_and_awaited, virtual_gpu.held_back))
    assert compiled == pytest.approx(plain, rel=0.01)


@each_way
def test_nothing_is_lost_on_a_fast_network(way: Any, before: Any) -> None:
    assert virtual_gpu.seconds_of(way, 0.3e-3) <= virtual_gpu.seconds_of(before, 0.3e-3)
