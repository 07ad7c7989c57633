"""Door C on arrays of a GPU, by each way they can go: on a stand-in, and on a real GPU where there is one.

On the stand-in memory is the host's, and what is enqueued runs late, in any order that the events allow. Memory that is
free is poisoned, so a result is wrong if anything is read or written too early or too late.
"""

import logging
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat.api import runtime, tensors
from mpistrat.core.errors import EngineError
from mpistrat.gpu import gpu_executor
from mpistrat.gpu.copy_kernel import CopyJob
from tests.support import copy_model, gpu_stand_in
from tests.support.dtypes import dtype_of

from ..support.levels import sample

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
INTEGERS = [np.dtype(name) for name in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")]
FLOATS = [np.dtype("float16"), BFLOAT16, np.dtype("float32"), np.dtype("float64")]
COMPLEX = [np.dtype("complex64"), np.dtype("complex128")]


class StandIn:
    STEPS = 200

    def __init__(self, rank: int):
        self.device = gpu_stand_in.Device(seed=rank)
        self._elsewhere = self.device.stream()

    def array(self, values: np.ndarray) -> Any:
        return self.device.tensor(values)

    def values(self, array: Any) -> np.ndarray:
        """The values, as the caller's stream sees them when it has come to this call."""
        return self._read(array, self.device.current_stream())

    def values_elsewhere(self, array: Any) -> np.ndarray:
        """The values, as a stream sees them that has waited for nothing."""
        return self._read(array, self._elsewhere)

    def _read(self, array: Any, stream: Any) -> np.ndarray:
        read: list[np.ndarray] = []
        self.device.enqueue(stream, lambda: read.append(array.view().copy()))
        while not read:
            self.device.run_a_little()
        return read[0]

    def used_bytes(self) -> int:
        return self.device.used_bytes

    def is_own(self, array: Any) -> bool:
        return isinstance(array, gpu_stand_in.Array)

    def close(self) -> None:
        """Nothing is held."""


class Cupy:
    STEPS = 1000

    def __init__(self) -> None:
        import cupy
        self._cupy = cupy
        cupy.cuda.Device(mpistrat.local_rank() % cupy.cuda.runtime.getDeviceCount()).use()
        cupy.cuda.Stream(non_blocking=True).use()
        self._elsewhere = cupy.cuda.Stream(non_blocking=True)

    def array(self, values: np.ndarray) -> Any:
        # As bytes, since cupy has no kernels for some dtypes. The second array takes the memory of the first.
        flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        self._cupy.full(flat.shape, 77, np.uint8)
        return self._cupy.asarray(flat).view(values.dtype).reshape(values.shape)

    def values(self, array: Any) -> np.ndarray:
        return np.asarray(self._cupy.asnumpy(array))

    def values_elsewhere(self, array: Any) -> np.ndarray:
        """The values, as a stream sees them that has waited for nothing."""
        return np.asarray(array.get(stream=self._elsewhere))

    def used_bytes(self) -> int:
        """Of arrays, and of what the engine holds."""
        return int(self._cupy.get_default_memory_pool().used_bytes())

    def is_own(self, array: Any) -> bool:
        return isinstance(array, self._cupy.ndarray)

    def close(self) -> None:
        self._cupy.cuda.Stream.null.use()


def why_no_gpu() -> str:
    """Why the tests that need a GPU are skipped; the same on all ranks of a host."""
    try:
        import cupy
        return "" if cupy.cuda.runtime.getDeviceCount() else "no GPU"
    except Exception as error:
        return f"no GPU: {type(error).__name__}: {error}"


NO_GPU = why_no_gpu()
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(bool(NO_GPU), reason=NO_GPU)]


@pytest.fixture(scope="module", params=[
    "stand-in nccl", "stand-in nccl host", "stand-in staged", "stand-in host",
    *(pytest.param(f"cupy {way}", marks=on_gpu) for way in ("auto", "auto host", "staged", "host"))])
def library(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A library of GPU arrays, and an engine that reduces them in the way that the parameter names."""
    kind, operations, *completion = request.param.split()
    rank = mpistrat.rank()
    found = StandIn(rank) if kind == "stand-in" else Cupy()
    mpistrat.shutdown()
    patch = pytest.MonkeyPatch()
    patch.setenv("MPISTRAT_GPU_OPERATIONS", operations)
    patch.setenv("MPISTRAT_DISABLE", "stream_order" if completion else "none")
    patch.setenv("MPISTRAT_FUSION_THRESHOLD", str(2**20))
    if kind == "stand-in":
        patch.setattr(tensors, "make_device", lambda number: found.device)
        patch.setitem(tensors.KINDS, "tests", tensors.Cupy())
    mpistrat.init()
    yield found
    mpistrat.shutdown()
    found.close()
    patch.undo()
    mpistrat.init()


@pytest.fixture
def reduced(library: Any) -> Callable[..., np.ndarray]:
    def reduce(values: np.ndarray, **arguments: Any) -> np.ndarray:
        result = mpistrat.allreduce(library.array(values), **arguments)
        assert library.is_own(result)
        return np.asarray(library.values(result))
    return reduce


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS, *COMPLEX], ids=str)
def test_sum(dtype: np.dtype, reduced: Callable, rank: int, size: int) -> None:
    result = reduced((np.arange(7) + rank).astype(dtype), op=mpistrat.Sum)
    assert result.dtype == dtype
    np.testing.assert_array_equal(result, (np.arange(7) * size + size * (size - 1) // 2).astype(dtype))


@sample("dtype", [*INTEGERS, np.dtype("bool"), *FLOATS], ids=str)
@pytest.mark.parametrize("op, of_list", [(mpistrat.Min, min), (mpistrat.Max, max)], ids=["min", "max"])
def test_min_and_max(op: Any, of_list: Callable, dtype: np.dtype, reduced: Callable, rank: int, size: int) -> None:
    result = reduced(np.array([rank % 2, size - rank, 1]).astype(dtype), op=op)
    columns = zip(*(np.array([r % 2, size - r, 1]).astype(dtype) for r in range(size)))
    np.testing.assert_array_equal(result, np.array([of_list(column) for column in columns], dtype))


@sample("dtype", [*INTEGERS, np.dtype("bool"), *FLOATS, *COMPLEX], ids=str)
def test_product(dtype: np.dtype, reduced: Callable, rank: int, size: int) -> None:
    result = reduced(np.array([2, 1, 0, rank]).astype(dtype), op=mpistrat.Product)
    np.testing.assert_array_equal(result, np.array([2**size, 1, 0, 0]).astype(dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_average(dtype: np.dtype, reduced: Callable, rank: int, size: int) -> None:
    result = reduced(np.full(5, 2 * rank).astype(dtype))
    np.testing.assert_allclose(result.astype(np.float64), size - 1, rtol=2.0**-7 if dtype == BFLOAT16 else 2.0**-10)


@pytest.mark.parametrize("dtype", ["int16", "int32", "int64"])
def test_an_average_of_integers_is_exact_and_truncated(dtype: str, reduced: Callable, rank: int, size: int) -> None:
    large = 2**53 + 1 if dtype == "int64" else 1001
    total = sum(range(size))
    result = reduced(np.array([large, rank, -rank], dtype))
    assert result.tolist() == [large, total // size, -(total // size)]


def test_prescale_and_postscale(reduced: Callable, rank: int, size: int) -> None:
    for dtype in FLOATS:
        result = reduced(np.array([rank + 1]).astype(dtype), op=mpistrat.Sum, prescale_factor=0.5, postscale_factor=4.0)
        assert result.tolist() == [size * (size + 1)]


def test_scalars_and_empty_arrays(reduced: Callable, size: int) -> None:
    assert reduced(np.array(3.0), op=mpistrat.Sum) == 3.0 * size
    assert reduced(np.empty((3, 0)), op=mpistrat.Sum).shape == (3, 0)


def test_a_group_of_mixed_dtypes_and_sizes(library: Any, rank: int, size: int) -> None:
    values = [np.full(count, rank + i).astype(dtype) for i, (count, dtype) in enumerate(
        (count, dtype) for count in (1, 0, 100, 3, 40_000) for dtype in ("float32", "int16", "float16"))]
    results = mpistrat.grouped_allreduce([library.array(value) for value in values], op=mpistrat.Sum)
    for i, (result, value) in enumerate(zip(results, values)):
        np.testing.assert_array_equal(library.values(result), np.full_like(value, size * i + size * (size - 1) // 2))


def test_rows_are_gathered_in_the_order_of_the_ranks(library: Any, rank: int, size: int) -> None:
    for rows in (2, rank, rank + 1):
        result = mpistrat.allgather(library.array(np.full((rows, 3), rank, np.int16)))
        expected = [[r] * 3 for r in range(size) for _ in range({2: 2, rank: r, rank + 1: r + 1}[rows])]
        if rows == 2 and 2 in (rank, rank + 1):
            continue  # The row counts of the cases are the same on this rank.
        assert library.values(result).tolist() == expected


def test_broadcast(library: Any, rank: int, size: int) -> None:
    for root in range(size):
        for dtype in ("float32", "bool", "complex128"):
            result = mpistrat.broadcast(library.array(np.full((2, 3), rank + 1, dtype)), root)
            np.testing.assert_array_equal(library.values(result), np.full((2, 3), root + 1, dtype))


def test_rows_are_sent_to_each_rank(library: Any, rank: int, size: int) -> None:
    even = mpistrat.alltoall(library.array(np.repeat(np.arange(size), 2) + 10 * rank))
    assert library.values(even).tolist() == [10 * r + rank for r in range(size) for _ in range(2)]
    splits = [(rank + to) % 3 for to in range(size)]
    rows = np.repeat(np.arange(size, dtype=np.float32), splits)[:, np.newaxis] + [0, 100 * rank]
    data, received = mpistrat.alltoall(library.array(np.concatenate([rows, rows[:1]])), splits)
    assert received.tolist() == [(r + rank) % 3 for r in range(size)]
    assert library.values(data).tolist() == [[rank, rank + 100 * r] for r in range(size) for _ in range((r + rank) % 3)]


def test_wrong_splits_are_an_error_on_all_ranks(library: Any, rank: int, size: int) -> None:
    with pytest.raises(ValueError, match=rf"the splits of rank {size - 1}, .* add up to more than the 2 rows"):
        mpistrat.alltoall(library.array(np.zeros(2)), [3 if rank == size - 1 else 0] * size)
    assert library.values(mpistrat.allreduce(library.array(np.ones(2)), op=mpistrat.Sum)).tolist() == [size] * 2


def test_collectives_go_on_without_a_rank_that_has_joined(library: Any, rank: int, size: int) -> None:
    mpistrat.allreduce(library.array(np.ones(1)))  # All ranks choose the backend together.
    for step in range(rank + 1):
        active = [r for r in range(size) if r >= step]
        reduced = [mpistrat.allreduce(library.array(np.full(5000, rank + 1, np.float32)), op=op, name=str(step))
                   for op in (mpistrat.Average, mpistrat.Max)]
        np.testing.assert_allclose(library.values(reduced[0]), np.mean(active) + 1, rtol=1e-6)
        assert library.values(reduced[1]).tolist() == [size] * 5000
        gathered = mpistrat.allgather(library.array(np.full((2, 3), rank, np.int16)))
        assert library.values(gathered)[:, 0].tolist() == [r for r in active for _ in range(2)]
        sent = mpistrat.broadcast(library.array(np.full(3, rank, np.float32)), size - 1)
        assert library.values(sent).tolist() == [size - 1] * 3
    assert mpistrat.join() == size - 1


def test_cpu_and_gpu_tensors_of_one_step_each_go_their_way(library: Any, rank: int, size: int) -> None:
    total = size * (size - 1) // 2
    for step in range(5):
        pending = [mpistrat.allreduce_async(make(np.full(50 + i, rank + step)), op=mpistrat.Sum, name=f"mixed.{i}")
                   for i, make in enumerate([library.array, np.asarray] * 3)]
        for i, result in enumerate(p.wait() for p in pending):
            values = result if i % 2 else library.values(result)
            np.testing.assert_array_equal(values, np.full(50 + i, total + size * step))


def wait_until_nothing_is_kept() -> None:
    """An idle engine looks at what the GPU has done, and frees the memory."""
    deadline = time.monotonic() + 20
    engine = runtime.group_of("", 0).engine
    while engine.controller.executor.device.kept:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    with engine._driving:
        """The thread that has looked is done with it."""


@pytest.mark.nightly
def test_steps_of_random_sizes_leave_no_wrong_value_and_no_memory(library: Any, rank: int, size: int) -> None:
    """Memory that is free is poisoned, or soon another tensor.

    Results are read in the order of the caller's stream, or on one that waits for nothing where the host has waited.
    """
    waits_on_host = os.environ["MPISTRAT_DISABLE"] == "stream_order" or \
        os.environ["MPISTRAT_GPU_OPERATIONS"] in ("staged", "host")
    values_of = library.values_elsewhere if waits_on_host else library.values
    random = np.random.default_rng(7)
    kept: list[tuple[Any, int]] = []
    used = []
    for step in range(library.STEPS + 1):
        counts = random.integers(1, 3000, random.integers(1, 6))
        results = mpistrat.grouped_allreduce(
            [library.array(np.full(count, rank + step, np.float32)) for count in counts], op=mpistrat.Sum,
            name=f"churn.{step % 3}")
        kept += [(result, size * step + size * (size - 1) // 2) for result in results]
        for result, value in kept[-3:]:
            assert (values_of(result) == value).all()
        if step % (library.STEPS // 2) == 0:
            kept.clear()
            del results, result
            wait_until_nothing_is_kept()
            used.append(library.used_bytes())
        del kept[:-10]
    assert used[1] == used[2] <= used[0] + 2**16


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_what_goes_by_the_host_is_summed_to_the_bits_of_cpu_tensors(dtype: str, library: Any, rank: int,
                                                                    size: int) -> None:
    if os.environ["MPISTRAT_GPU_OPERATIONS"] not in ("staged", "host"):
        pytest.skip("NCCL sums in an order of its own")
    values = [np.random.default_rng(rank).normal(size=count).astype(dtype) for count in (1, 1000, 200_001)]
    on_gpu = mpistrat.grouped_allreduce([library.array(value) for value in values], op=mpistrat.Sum)
    for result, on_cpu in zip(on_gpu, mpistrat.grouped_allreduce(values, op=mpistrat.Sum)):
        np.testing.assert_array_equal(library.values(result), on_cpu)


def test_ranks_that_disagree_on_the_device_are_told(library: Any, rank: int, size: int) -> None:
    if os.environ["MPISTRAT_GPU_OPERATIONS"] == "host":
        pytest.skip("they do not disagree then")
    value = np.ones(3)
    with pytest.raises(mpistrat.MismatchError, match=r"odd device: the ranks disagree on device: cpu on ranks "
                                                     r"\[.*\]; gpu on ranks"):
        mpistrat.allreduce(library.array(value) if rank == size - 1 else value, name="odd device")
    np.testing.assert_array_equal(library.values(mpistrat.allreduce(library.array(value))), value)


def test_ranks_without_a_gpu_take_part_when_all_go_by_the_host(library: Any, rank: int, size: int) -> None:
    if os.environ["MPISTRAT_GPU_OPERATIONS"] != "host":
        pytest.skip("the ranks disagree on the device otherwise")
    value = np.arange(3.0) + rank
    result = mpistrat.allreduce(library.array(value) if rank == size - 1 else value, op=mpistrat.Sum)
    assert library.is_own(result) == (rank == size - 1)
    values = library.values(result) if rank == size - 1 else result
    np.testing.assert_array_equal(values, np.arange(3) * size + size * (size - 1) // 2)


def test_a_group_is_on_one_device(library: Any) -> None:
    if os.environ["MPISTRAT_GPU_OPERATIONS"] == "host":
        pytest.skip("all are on the host then")
    with pytest.raises(mpistrat.InvalidRequestError, match="must all be on the CPU, or all on the GPU"):
        mpistrat.grouped_allreduce([library.array(np.ones(2)), np.ones(2)])


def test_a_tensor_on_another_gpu_is_refused(library: Any) -> None:
    array = library.array(np.ones(2))
    mpistrat.allreduce(array)
    other = array.__dlpack_device__()[1] + 1
    with pytest.raises(mpistrat.InvalidRequestError, match=f"on GPU {other}, but this rank's tensors are on GPU"):
        tensors.this_ranks_gpu(other)


def test_one_line_says_which_way_the_tensors_go(library: Any, request: pytest.FixtureRequest,
                                                caplog: pytest.LogCaptureFixture) -> None:
    wanted = os.environ["MPISTRAT_GPU_OPERATIONS"]
    mpistrat.shutdown()
    with caplog.at_level("INFO", "mpistrat"):
        mpistrat.init()
        logging.getLogger("mpistrat").setLevel("INFO")
        for _ in range(3):
            mpistrat.allreduce(library.array(np.ones(2)))
    lines = [line for line in caplog.messages if "GPU tensors are" in line]
    assert len(lines) == (mpistrat.rank() == 0)
    if lines and wanted in ("staged", "host"):
        assert lines[0].endswith(f"MPISTRAT_GPU_OPERATIONS={wanted}")


@pytest.fixture
def begun(rank: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], StandIn]]:
    """Begins a job on a stand-in with MPISTRAT_GPU_OPERATIONS as given, which ends with the test."""
    found = StandIn(rank)

    def begin(operations: str) -> StandIn:
        monkeypatch.setenv("MPISTRAT_GPU_OPERATIONS", operations)
        monkeypatch.setattr(tensors, "make_device", lambda number: found.device)
        monkeypatch.setitem(tensors.KINDS, "tests", tensors.Cupy())
        mpistrat.shutdown()
        mpistrat.init()
        return found

    yield begin
    mpistrat.shutdown()
    monkeypatch.undo()
    mpistrat.init()


@pytest.fixture
def overlapping(size: int, begun: Callable, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """As `begun`; adds two sets that overlap, and a list whose last element is the set that connects."""
    if size < 3:
        pytest.skip("sets of two ranks overlap among three")
    world, connecting = MPI.COMM_WORLD, list[Any]()
    monkeypatch.setattr(gpu_stand_in.Communicator, "meet", lambda self, unique_id: world.Create_group(
        world.group.Incl(connecting[-1].ranks)))
    return lambda operations: (begun(operations), [mpistrat.add_process_set(ranks) for ranks in ([0, 1], [1, 2])],
                               connecting)


def test_of_sets_that_overlap_one_uses_nccl_and_all_have_the_right_sums(rank: int, overlapping: Callable) -> None:
    found, sets, connecting = overlapping("auto")
    by_nccl = []
    for process_set in (*sets, mpistrat.global_process_set, *sets):
        connecting.append(process_set)
        if process_set.included():
            calls = len([entry for entry in found.device.log if entry[0] == "allReduce"])
            result = mpistrat.allreduce(found.array(np.full(3, rank, np.float32)), op=mpistrat.Sum,
                                        process_set=process_set)
            assert found.values(result).tolist() == [sum(process_set.ranks)] * 3
            by_nccl.append(len([entry for entry in found.device.log if entry[0] == "allReduce"]) > calls)
        mpistrat.barrier()
    # The first one keeps it, and of set [1, 2] and all ranks each has a rank that is in the first.
    assert by_nccl == {0: [True, False, True], 1: [True, False, False, True, False], 2: [False] * 3}[rank]


# What a program begins with, from this rank's array, and its result from the rows of the ranks of the set.
BEGINNINGS: dict[str, tuple[Callable[..., Any], Callable[[list[np.ndarray]], np.ndarray]]] = {
    "sum": (partial(mpistrat.allreduce_async, op=mpistrat.Sum), sum),
    "largest": (partial(mpistrat.allreduce_async, op=mpistrat.Max), lambda rows: np.max(rows, axis=0)),
    "group": (lambda x, **options: mpistrat.grouped_allreduce_async([x, x], op=mpistrat.Sum, **options), sum),
    "rows": (mpistrat.allgather_async, np.concatenate),
    "broadcast": (lambda x, process_set, **options: mpistrat.broadcast_async(
        x, process_set.ranks[-1], process_set=process_set, **options), lambda rows: rows[-1])}


@pytest.mark.parametrize("operations", ["auto", "nccl"])
def test_random_programs_of_sets_that_overlap(operations: str, rank: int, overlapping: Callable) -> None:
    """150 programs: the sets' collectives begin in another order on each rank, and go on from results not read yet."""
    found, sets, connecting = overlapping(operations)
    for process_set in (mpistrat.global_process_set, *sets):
        connecting.append(process_set)
        if process_set.included():
            mpistrat.allreduce(found.array(np.ones(1)), op=mpistrat.Sum, process_set=process_set)
        mpistrat.barrier()
    wrong = []
    for number in range(150):
        chooser, own_order = random.Random(number), random.Random(1000 * number + rank)
        tasks = [(process_set, f"{place}.{i}", chooser.choice(list(BEGINNINGS)), (chooser.randrange(1, 5), 3))
                 for place, process_set in enumerate((mpistrat.global_process_set, *sets))
                 for i in range(chooser.randrange(4))]
        tasks = [task for task in tasks if task[0].included()]
        begun: list[Any] = [None] * len(tasks)
        for i in own_order.sample(range(len(tasks)), len(tasks)):
            process_set, name, kind, shape = tasks[i]
            begun[i] = BEGINNINGS[kind][0](found.array(np.full(shape, rank + number % 7, np.float32)), name=name,
                                           process_set=process_set)
        results = [each.wait()[-1] if task[2] == "group" else each.wait()
                   for task, each in zip(tasks, begun, strict=True)]
        for i in own_order.sample(range(len(tasks)), len(tasks)):
            begun[i] = mpistrat.allreduce_async(results[i], op=mpistrat.Sum, prescale_factor=2.0,
                                                name=f"{tasks[i][1]} again", process_set=tasks[i][0])
        del results  # Nothing keeps their memory but the engine.
        for (process_set, name, kind, shape), each in zip(tasks, begun, strict=True):
            rows = [np.full(shape, r + number % 7, np.float32) for r in process_set.ranks]
            expected = 2 * len(rows) * BEGINNINGS[kind][1](rows)
            if not np.array_equal(found.values(each.wait()), expected):
                wrong.append((number, name, kind))
    assert wrong == []
    own = [each for each in (mpistrat.global_process_set, *sets) if each.included()]
    if operations == "nccl":  # Those of one stream would wait for each other.
        assert [runtime.group_of("", each.process_set_id).engine.controller.executor.device._completes_by_streams
                for each in own] == [True] + [False] * (len(own) - 1)


def test_ranks_whose_streams_wait_and_ranks_that_wait_on_the_host_meet(
        rank: int, size: int, begun: Callable, monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture) -> None:
    def fail(device: Any, buffer: Any) -> None:
        raise EngineError("the check of CUDA streams needs 96 bytes of GPU memory, and not enough is free")

    if rank == 0:
        monkeypatch.setattr(gpu_executor, "check_waiting", fail)
    found = begun("nccl")
    with caplog.at_level(logging.WARNING):
        for step in range(10):
            result = mpistrat.allreduce(found.array(np.full(5, rank + step, np.float32)), op=mpistrat.Sum)
            assert (found.values(result) == size * step + size * (size - 1) // 2).all()
    assert runtime.group_of("", 0).engine.controller.executor.device._completes_by_streams == (rank != 0)
    assert caplog.messages == [f"rank {rank}: the host waits for results of GPU collectives, because the check of CUDA "
                               "streams has not passed: the check of CUDA streams needs 96 bytes of GPU memory, and "
                               "not enough is free"] * (rank == 0)


@pytest.mark.parametrize("begins", ["at once", "later"])
def test_a_rank_whose_gpu_gives_wrong_numbers_is_found_by_all(begins: str, rank: int, size: int, begun: Callable,
                                                              monkeypatch: pytest.MonkeyPatch,
                                                              caplog: pytest.LogCaptureFixture) -> None:
    found, copy = begun("auto"), gpu_stand_in.Device.batched_copy

    def garble(self: Any, table: np.ndarray, blocks: int, job: CopyJob, stream: Any, *lost: int) -> None:
        copy(self, table, blocks, job, stream, *lost)
        target = int(table["target"][-1])
        self.enqueue(stream, lambda: copy_model.memory_at(target, 1, dtype_of(job.target)).fill(97))

    def garbled() -> None:
        if rank == size - 1:
            monkeypatch.setattr(gpu_stand_in.Device, "batched_copy", garble)

    def reduced() -> list[Any]:
        arrays = [found.array(np.full(count, rank + 1.0, np.float32)) for count in (300, 7)]
        return [found.values(each).tolist() for each in mpistrat.grouped_allreduce(arrays, op=mpistrat.Sum, name="sum")]

    right = [[size * (size + 1) / 2] * count for count in (300, 7)]
    if begins == "at once":
        garbled()
        with caplog.at_level(logging.WARNING):
            assert [reduced() for _ in range(3)] == [right] * 3  # Through host memory.
        messages = [text for text in caplog.messages if "NCCL gives wrong numbers" in text]
        assert len(messages) == (rank == 0)
        assert all(re.search(rf"numbers: .*rank {size - 1}: sum of float32", text) for text in messages)
    else:
        assert reduced() == right
        garbled()
        with pytest.raises(EngineError, match=rf"on the CPU: .*rank {size - 1}: sum, element 0: "):
            reduced()
