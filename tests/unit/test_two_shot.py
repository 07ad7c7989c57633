"""Shared memory among ranks of a host, with threads in the place of processes."""

import fcntl
import mmap
import os
import random
import threading

import numpy as np
import pytest

from mpistrat.core.arithmetic import IDENTITY, Reduction, Scale
from mpistrat.core.errors import EngineError, StallError
from mpistrat.core.request import ReduceOp
from mpistrat.core.topology import Topology
from mpistrat.transport.host_link import HostFile
from mpistrat.transport.shm.segment import HostMemory
from mpistrat.transport.shm.shm_data import SharedMemoryData
from mpistrat.transport.shm.two_shot import ChunkChoice
from tests.support.thread_group import ThreadGroup

from ..support.shared_memory_of_threads import host_files, shared_memory_planes
from ..support.threads import on_all

LIMIT_S = 20.0
CHUNK = 4096
FITTING = SharedMemoryData.slots * CHUNK // 4  # float32 that are reduced at once at the most, with chunks so small
ONE_SHOT = SharedMemoryData.one_shot_bytes // 4
SIZES = [0, 1, 2, 3, 1000, FITTING, FITTING + 1, ONE_SHOT, ONE_SHOT + 1, 3 * CHUNK // 4, 20 * CHUNK // 4 + 7]


def memories(count: int, limit_s: float = LIMIT_S, topology: Topology | None = None) -> list[HostMemory]:
    """What each of `count` ranks has of one block."""
    block = mmap.mmap(-1, HostMemory.size_for(count, 0))
    ranks = [10 + rank for rank in range(count)]
    return [HostMemory(block, index, ranks, limit_s, topology) for index in range(count)]


def planes(count: int) -> list[SharedMemoryData]:
    """The data plane of each of `count` ranks; what it passes on is served by a ThreadGroup."""
    group = ThreadGroup(count, LIMIT_S)
    return shared_memory_planes([10 + rank for rank in range(count)], [CHUNK], [group.data(i) for i in range(count)],
                                LIMIT_S)


def allreduced(data: SharedMemoryData, arrays: list[np.ndarray], op: ReduceOp = ReduceOp.SUM, prescale: float = 1.0,
               scale: Scale = IDENTITY) -> list[np.ndarray]:
    targets = [np.empty_like(array) for array in arrays]
    data.allreduce(arrays, targets, Reduction(op, prescale, scale))
    return targets


# -- counters ---------------------------------------------------------------------------------------------------------


def test_a_rank_waits_for_the_counters_of_all_others() -> None:
    first, second, third = memories(3)
    second.post(5, 2)
    passed = threading.Event()

    def wait() -> None:
        first.await_all(4, 2)
        passed.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not passed.wait(0.05)
    third.post(4, 2)
    thread.join(LIMIT_S)
    assert passed.is_set()


@pytest.mark.parametrize(("topology", "name"), [
    (None, 11), (Topology(10, ("",) * 12, tuple(range(20, 32))), 31)], ids=["of the job", "of a process set"])
def test_a_rank_that_has_left_is_named_at_once_by_its_rank_in_the_job(topology: Topology | None, name: int) -> None:
    first, second = memories(2, topology=topology)
    second.abandon()
    with pytest.raises(EngineError, match=f"rank {name} has left in the middle of a collective"):
        first.await_all(1, 0)


def test_a_rank_that_has_left_since_it_had_waited_too_long_is_named_with_the_hosts() -> None:
    first, second = memories(2, topology=Topology(10, ("there",) * 10 + ("here",) * 2))
    second.abandon(is_stalled=True)
    second.abandon()
    with pytest.raises(StallError, match=r"rank 11 has left in the middle of a collective, after it had waited too "
                                         r"long for others\. Either the network between the hosts here and there"):
        first.await_all(1, 0)


# -- the memory itself ------------------------------------------------------------------------------------------------


def test_every_rank_maps_the_same_memory_which_is_reserved() -> None:
    files = host_files(3)
    for nbytes in (1, 70_000, 100, 8192, 1_000_000):
        blocks = [file.map(nbytes) for file in files]
        blocks[1][nbytes - 1] = 42
        assert [block[nbytes - 1] for block in blocks] == [42, 42, 42]
        assert all(len(block) == nbytes for block in blocks)
        assert os.fstat(files[0].descriptor).st_blocks * 512 >= nbytes
    for file in files:
        file.close()
        file.close()


def test_a_file_can_grow_but_not_shrink() -> None:
    file = HostFile.make()
    block = file.map(100)
    with pytest.raises(PermissionError):
        os.ftruncate(file.descriptor, 0)
    with pytest.raises(PermissionError):
        fcntl.fcntl(file.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    block[99] = 1
    larger = file.map(100_000)
    larger[99_999] = 2
    assert (block[99], larger[99]) == (1, 1)
    file.close()


def test_only_the_file_of_a_rank_is_taken_and_what_is_not_is_closed() -> None:
    made = HostFile.make()
    unsealed, ordinary = os.memfd_create("other", os.MFD_ALLOW_SEALING), os.open(os.devnull, os.O_RDWR)
    for wrong in (unsealed, ordinary):
        with pytest.raises(OSError, match=r"^the received descriptor is not a file of shared memory: "):
            HostFile.over(wrong)
        with pytest.raises(OSError):
            os.fstat(wrong)
    same = HostFile.over(os.dup(made.descriptor))
    made.map(1)[0] = 7
    assert same.map(1)[0] == 7
    made.close()
    same.close()


# -- all-reduce -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT])
def test_every_size_is_reduced_in_the_order_of_the_ranks(count: int, op: ReduceOp) -> None:
    inputs = [[np.random.default_rng(rank).normal(size=size).astype(np.float32) for size in SIZES]
              for rank in range(count)]
    data = planes(count)
    results = on_all(count, lambda index: [allreduced(data[index], [array], op)[0] for array in inputs[index]])
    ufuncs = {ReduceOp.SUM: np.add, ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum, ReduceOp.PRODUCT: np.multiply}
    for i in range(len(SIZES)):
        expected = inputs[0][i]
        for rank in range(1, count):
            expected = ufuncs[op](expected, inputs[rank][i])
        for result in results:
            np.testing.assert_array_equal(result[i], expected)


@pytest.mark.parametrize("dtype", ["int8", "uint64", "float16", "bfloat16", "float64", "complex128", "longdouble",
                                   "bool"])
def test_every_dtype_fits_into_chunks(dtype: str) -> None:
    kind = np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype)
    data = planes(2)
    results = on_all(2, lambda index: allreduced(data[index], [(np.arange(9001) % 2).astype(kind)], ReduceOp.MAX if
                                                 dtype != "complex128" else ReduceOp.SUM)[0])
    expected = (np.arange(9001) % 2).astype(kind) * (2 if dtype == "complex128" else 1)
    for result in results:
        np.testing.assert_array_equal(result, expected.astype(kind))


def test_a_list_is_reduced_as_if_it_were_one_array() -> None:
    shapes = [(3, 5), (), (0, 4), (70_000,), (1,), (2, 3, 4), (5000,)]
    inputs = [[np.random.default_rng(rank).normal(size=shape) for shape in shapes] for rank in range(3)]
    data = planes(3)
    results = on_all(3, lambda index: allreduced(data[index], inputs[index], prescale=0.5, scale=Scale(1.0, 3)))
    for result in results:
        for i, shape in enumerate(shapes):
            assert result[i].shape == shape
            expected = (inputs[0][i] * 0.5 + inputs[1][i] * 0.5 + inputs[2][i] * 0.5) * (1 / 3)
            np.testing.assert_array_equal(result[i], expected)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.float16])
def test_an_average_is_that_of_the_sum(count: int, dtype: type) -> None:
    inputs = [(1000 * np.random.default_rng(rank).normal(size=5000)).astype(dtype) for rank in range(count)]
    data = planes(count)
    wide = np.float32 if dtype == np.float16 else dtype
    total = inputs[0].astype(wide)
    for other in inputs[1:]:
        total = total + other.astype(wide)
    expected = np.trunc(total / count).astype(dtype) if dtype == np.int32 else (total / wide(count)).astype(dtype)
    for result, in on_all(count, lambda index: allreduced(data[index], [inputs[index]], scale=Scale(1.0, count))):
        np.testing.assert_array_equal(result, expected)


@pytest.mark.nightly
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_the_bits_do_not_depend_on_the_size_of_the_chunks_which_the_first_rank_changes_at_any_time(
        count: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large all-reduces of several kinds, with chunks of a size that no other rank can know, among small ones."""
    chosen = random.Random(0)
    monkeypatch.setattr(ChunkChoice, "upcoming", lambda self: chosen.choice((CHUNK, 2 * CHUNK, 8 * CHUNK)))
    monkeypatch.setattr(ChunkChoice, "took", lambda self, chunk, s_per_byte: sizes_used.add(chunk))
    monkeypatch.setattr(SharedMemoryData, "choice_bytes", ONE_SHOT)
    sizes_used: set[int] = set()
    group = ThreadGroup(count, LIMIT_S)
    data = shared_memory_planes(list(range(count)), [CHUNK, 2 * CHUNK, 8 * CHUNK],
                                [group.data(i) for i in range(count)], LIMIT_S)
    fixed = planes(count)
    sizes = np.random.default_rng(0).choice([10, 3000, 40_000, 80_000, 300_000], 150).tolist()

    def work(index: int) -> None:
        values, chance = np.random.default_rng(index), np.random.default_rng(100 + index)
        for size in sizes:
            sources = [(10 * values.normal(size=part)).astype(dtype) for part in (size // 3, size - size // 3)]
            targets = [np.empty_like(source) for source in sources]
            prepared = data[index].prepare(sources, targets, Reduction(ReduceOp.SUM, 0.5))
            if chance.random() < 0.5:
                prepared.pack_ahead()
            prepared.finish(all_packed=False)
            for target, right in zip(targets, allreduced(fixed[index], sources, prescale=0.5), strict=True):
                assert target.tobytes() == right.tobytes()
            if size == 10:
                part = np.empty(20_000, np.float32)
                data[index].reducescatter(np.full(20_000 * count, 1.0, np.float32), part, [20_000] * count,
                                          Reduction(ReduceOp.SUM))
                assert (part == count).all()

    on_all(count, work)
    assert sizes_used == {CHUNK, 2 * CHUNK, 8 * CHUNK}


def test_what_is_packed_ahead_is_reduced_with_what_is_not() -> None:
    sizes = np.random.default_rng(0).integers(1, 60_000, 80)
    data = planes(3)

    def work(index: int) -> bool:
        chance, right = np.random.default_rng(index), []
        for step, size in enumerate(sizes):
            source = np.full(size, float(step + index))
            target = source if chance.random() < 0.3 else np.empty(size)
            arguments: tuple = [source], [target], Reduction(ReduceOp.SUM)
            if chance.random() < 0.3:
                data[index].prepare([np.full(size, -1.0)], [np.empty(size)], *arguments[2:]).pack_ahead()
            if chance.random() < 0.5:
                prepared = data[index].prepare(*arguments)
                prepared.pack_ahead()
                prepared.finish(all_packed=False)
            else:
                data[index].allreduce(*arguments)
            right.append(bool((target == 3 * step + 3).all()))
        return all(right)

    assert on_all(3, work) == [True] * 3


def test_nobody_waits_where_all_have_packed_before() -> None:
    data = planes(2)
    for step in range(3):
        sources, targets = [np.full(9, float(step + index)) for index in range(2)], [np.empty(9), np.empty(9)]
        prepared = [plane.prepare([source], [target], Reduction(ReduceOp.SUM))
                    for plane, source, target in zip(data, sources, targets, strict=True)]
        assert all(one.is_packed for one in prepared)
        for one in prepared:
            one.finish(all_packed=True)  # one after the other, in one thread
        np.testing.assert_array_equal(targets, 2 * step + 1)


def test_nothing_is_packed_ahead_over_what_others_may_still_read() -> None:
    full = np.ones(SharedMemoryData.slots * CHUNK // 8)
    blocked = planes(2)[0]
    blocked.free_at = list(range(1, SharedMemoryData.slots + 1))  # as if rank 1 had not consumed the chunks before
    before = blocked._bytes.copy()
    blocked.prepare([full], [np.empty_like(full)], Reduction(ReduceOp.SUM)).pack_ahead()
    assert not blocked.prepare([full[:1]], [full[:1]], Reduction(ReduceOp.SUM)).is_packed
    np.testing.assert_array_equal(blocked._bytes, before)
