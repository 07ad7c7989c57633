"""8-bit numbers between hosts: the planes of made-up hosts, and gradients on them."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from mpi4py import MPI

from mpistrat.api.group import backends_over
from mpistrat.core.arithmetic import Reduction, Scale
from mpistrat.core.interfaces import DataPlane
from mpistrat.core.interruption import Interruption
from mpistrat.core.quantised import BLOCK, Quantised
from mpistrat.core.request import ReduceOp
from mpistrat.core.settings import Settings
from mpistrat.core.topology import Topology

from ..support.levels import sample

# By the number of ranks: the hosts of the ranks. With three hosts a large slice has two hops, and a small one has one.
PLACEMENTS = {1: ["A"], 2: ["AA", "AB"], 3: ["AAA", "AAB", "ABC"]}
LEVELS = 127  # numbers between zero and the largest one
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def planes() -> Iterator[dict[str, DataPlane]]:
    rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    made = {hosts: backends_over(MPI.COMM_WORLD, Topology(rank, tuple(hosts)), Settings(), Interruption())
            for hosts in PLACEMENTS[size]}
    yield {hosts: each.data for hosts, each in made.items()}
    for each in made.values():
        each.close()


def quantised(divisor: int = 1, name: str = "") -> Reduction:
    """A sum of 8-bit numbers, divided; with a name not used before it has error feedback."""
    return Reduction(ReduceOp.SUM, 1.0, Scale(1.0, divisor), Quantised(name))


def inputs_of(size: int, count: int, seed: int) -> list[np.ndarray]:
    """The values of each rank: of all magnitudes, in each block of its own one."""
    random = np.random.default_rng(seed)
    magnitude = np.repeat(10.0 ** random.integers(-6, 6, -(-count // BLOCK)), BLOCK)[:count]
    return [(random.standard_normal(count) * magnitude).astype(np.float32) for _ in range(size)]


def reduced(plane: DataPlane, sources: Sequence[np.ndarray], reduction: Reduction) -> np.ndarray:
    """The result, one after the other, which all ranks have with the same bits."""
    targets = [np.empty_like(source) for source in sources]
    plane.allreduce(sources, targets, reduction)
    flat = np.concatenate([target.reshape(-1) for target in targets])
    assert len(set(MPI.COMM_WORLD.allgather(flat.tobytes()))) == 1, (plane.name, flat.size)
    return flat


@pytest.mark.parametrize("count", [1, 255, 257, 20_000, 1_500_001])
def test_the_sum_between_hosts_is_near_and_has_the_same_bits(planes: dict[str, DataPlane], rank: int, size: int,
                                                             count: int) -> None:
    values = inputs_of(size, count, count)
    exact = np.sum(values, axis=0, dtype=np.float64) / size
    blocks = np.arange(count) // BLOCK
    largest = np.maximum.reduceat(np.max(np.abs(values), axis=0), np.arange(0, count, BLOCK))[blocks]
    for hosts, plane in planes.items():
        got = reduced(plane, [values[rank][:count // 3], values[rank][count // 3:]], quantised(size))
        if len(set(hosts)) == 1:
            as_they_are = reduced(plane, [values[rank]], Reduction(ReduceOp.SUM, 1.0, Scale(1.0, size)))
            assert got.tobytes() == as_they_are.tobytes()
            continue
        # Slices of ranks and hosts begin anywhere, so a block may be of two magnitudes: those are left out.
        error = np.abs(got - exact)
        is_inside = (np.pad(largest, BLOCK, "edge")[:count] == largest) & (np.pad(largest, BLOCK, "edge")[2 * BLOCK:]
                                                                             == largest)
        assert np.all(error[is_inside] <= (2 * largest[is_inside] / LEVELS)), hosts
        assert count < 255 or error.any(), hosts  # They were rounded.


@sample("count", [5_000, 700_001])
def test_the_sum_of_many_steps_is_right_to_one_rounding(planes: dict[str, DataPlane], rank: int, size: int,
                                                        count: int) -> None:
    for hosts, plane in planes.items():
        if len(set(hosts)) == 1:
            continue
        name, steps = f"steps {next(NUMBERS)}", 20
        random = np.random.default_rng(rank)
        total, exact, alone = np.zeros(count), np.zeros(count), np.zeros(count)
        means = np.linspace(0.001, 0.004, count)  # below half a quantum: without feedback all of them are lost
        for _ in range(steps):
            own = (means * random.random(count)).astype(np.float32)
            own[::BLOCK // 2] = 1.0  # the largest value, in each block of any slice
            total += reduced(plane, [own], quantised(1, name))
            alone += reduced(plane, [own], quantised(1))
            exact += np.sum(MPI.COMM_WORLD.allgather(own), axis=0, dtype=np.float64)
        most = size * 1.1 / LEVELS  # the quanta of the hosts' sums, and of their sum
        assert np.abs(total - exact).max() <= most, hosts
        assert np.abs(alone - exact).max() > np.abs(total - exact).max() * 1.5, hosts


@sample("value", [np.nan, np.inf, -np.inf])
def test_a_block_that_is_not_finite_is_so_on_all_ranks_and_forgotten(planes: dict[str, DataPlane], rank: int,
                                                                     size: int, value: float) -> None:
    for hosts, plane in planes.items():
        own, name = np.linspace(1, 2, 100_000, dtype=np.float32), f"finite {next(NUMBERS)}"
        if rank == size - 1:
            own[50_000] = value
        got = reduced(plane, [own], quantised(size, name))
        assert not np.isfinite(got[50_000]), hosts
        assert (~np.isfinite(got)).sum() <= BLOCK, hosts
        own[50_000] = 1.5
        np.testing.assert_allclose(reduced(plane, [own], quantised(size, name)), np.linspace(1, 2, 100_000),
                                   atol=4 / LEVELS)
