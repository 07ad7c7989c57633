"""The cost model of an all-reduce."""

import math

import pytest

from mpistrat.cli.bench.cost_model import Machine, allreduce_s, efficiency, fit

MACHINE = Machine(host_latency_s=1e-4, host_bandwidth=4e9, wire_latency_s=1e-5, wire_bandwidth=1e9, ranks_per_host=4)


def test_one_rank_has_nothing_to_reduce() -> None:
    assert allreduce_s(MACHINE, 1, 1e9) == 0


def test_in_a_host_it_is_latency_and_bandwidth() -> None:
    assert math.isclose(allreduce_s(MACHINE, 4, 4e9), 1e-4 + 1)


@pytest.mark.parametrize("hosts", [2, 3, 64])
def test_across_hosts_the_wire_carries_the_least_that_is_possible(hosts: int) -> None:
    seconds = allreduce_s(MACHINE, 4 * hosts, 1e9) - allreduce_s(MACHINE, 4 * hosts, 0)
    assert math.isclose(seconds, 2 * (hosts - 1) / hosts)


def test_a_wire_that_is_quicker_than_the_host_is_hidden() -> None:
    quick = Machine(1e-4, 4e9, 0.0, 1e12, 4)
    assert math.isclose(allreduce_s(quick, 8, 4e9), allreduce_s(quick, 4, 4e9))


def test_large_jobs_lose_by_latency_alone() -> None:
    times = [allreduce_s(MACHINE, ranks, 1e9) for ranks in (8, 64, 1024, 16_384)]
    assert times == sorted(times)
    assert times[-1] < 2 * 1.001 + 2 * 4096 * 1e-5 + 1e-3


@pytest.mark.parametrize(("overlap", "expected"), [(0.0, 0.5), (0.5, 2 / 3), (1.0, 1.0)])
def test_efficiency_is_what_averaging_leaves(overlap: float, expected: float) -> None:
    step_s = allreduce_s(MACHINE, 4, 1e9)
    assert math.isclose(efficiency(MACHINE, 4, 1e9, step_s, overlap), expected)


def test_a_fit_finds_what_the_points_were_made_of() -> None:
    latency, bandwidth = fit([(m, 1e-4 + m / 5e9) for m in (1e3, 1e5, 1e7, 1e9)])
    assert math.isclose(latency, 1e-4, rel_tol=1e-6)
    assert math.isclose(bandwidth, 5e9, rel_tol=1e-6)


@pytest.mark.parametrize(("points", "text"), [
    ([], "two sizes"), ([(5.0, 1.0), (5.0, 2.0)], "two sizes"), ([(1.0, 2.0), (1e6, 1.0)], "does not grow")])
def test_points_without_information_are_an_error(points: list, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        fit(points)
