"""Results in memory that all ranks of a host read, with threads in the place of processes."""

import logging
import os
import random
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpistrat.collectives import shared_results as module
from mpistrat.collectives.host_memory import PACKED, READY
from mpistrat.collectives.local import ThreadGroup
from mpistrat.collectives.shared_memory import SharedMemoryData
from mpistrat.collectives.shared_results import SharedResults
from mpistrat.engine import Engine
from mpistrat.execution import Executor
from mpistrat.messages import DEVICE_GPU, ReduceOp
from mpistrat.requests import Average, allreduce_request, specs_of
from mpistrat.scale import IDENTITY, Scale
from mpistrat.settings import Settings
from mpistrat.tensor_queue import Entry, Handle

from ..shared_memory_of_threads import shared_memory_planes, shared_results

LIMIT_S = 20.0
LISTS = [np.zeros((3, 5), np.float32), np.zeros(100, np.int64), np.zeros(0), np.zeros((), np.float16)]


class Host:
    """The ranks of a host, as far as SharedResults is concerned: it is called as in all-reduces."""

    def __init__(self, count: int):
        shared = shared_results(list(range(count)), 0, LIMIT_S)
        self.memories = [memory for memory, _ in shared]
        self.results: list[SharedResults] = [results for _, results in shared]
        self.lent: list[list[list[np.ndarray] | None]] = [[] for _ in range(count)]
        self.turn = 0
        self.threads = ThreadPoolExecutor(count)

    def allreduce(self, arrays: list[np.ndarray], wanted: tuple[bool, ...] = (True, True)) -> list[Any]:
        """The memory that each rank is lent for the results."""
        self.turn += 1

        def work(index: int) -> Any:
            results = self.results[index]
            lent, = results.lend([arrays], wanted[index])
            results.declare()
            self.memories[index].post(self.turn, PACKED)
            self.memories[index].await_all(PACKED, self.turn)
            targets = [np.empty_like(array) for array in arrays] if lent is None else lent
            assert results.are_lent(targets) == (lent is not None)
            self.memories[index].post(self.turn, READY)
            self.memories[index].await_all(READY, self.turn)
            results.learn()
            return lent
        return list(self.threads.map(work, range(len(self.results))))

    def close(self) -> None:
        self.threads.shutdown()
        for results in self.results:
            results.close()


@pytest.fixture
def host() -> Iterator[Host]:
    found = Host(2)
    yield found
    found.close()


def places(lent: list[list[np.ndarray] | None]) -> list[int | None]:
    """Which memory each rank was lent, by a number that it has on all ranks."""
    for index, arrays in enumerate(lent):
        if arrays is not None:
            arrays[0].reshape(-1)[:1] = index
    return [None if arrays is None else int(arrays[0].reshape(-1)[0]) for arrays in lent]


def test_memory_is_lent_when_results_of_a_size_were_wanted_twice(host: Host) -> None:
    assert host.allreduce(LISTS) == host.allreduce(LISTS) == [None, None]
    first, second = host.allreduce(LISTS)
    for theirs, ours, array in zip(first, second, LISTS, strict=True):
        assert (ours.shape, ours.dtype, ours.ctypes.data % 64) == (array.shape, array.dtype, 0)
        theirs[...] = 7
        np.testing.assert_array_equal(ours, np.full_like(array, 7))


def test_a_block_is_lent_again_only_when_all_ranks_have_let_go_of_it(host: Host) -> None:
    for _ in range(2):
        host.allreduce(LISTS)
    kept = host.allreduce(LISTS)[1][1]  # one array, on one rank
    kept[...] = 5
    for _ in range(6):
        for lent in host.allreduce(LISTS):
            if lent is not None:
                lent[1][...] = 6
    assert (kept == 5).all()
    addresses = set()
    before = kept.ctypes.data
    del kept, lent
    for _ in range(6):
        lent = host.allreduce(LISTS)[1]
        assert lent is not None
        addresses.add(lent[1].ctypes.data)
        del lent
    assert before in addresses


def test_two_blocks_are_enough_for_one_result_after_the_other(host: Host) -> None:
    for _ in range(20):
        host.allreduce(LISTS)
    assert len(host.results[0]._blocks) == 2


def test_the_lists_of_one_call_are_lent_different_memory(host: Host) -> None:
    for _ in range(4):
        host.allreduce(LISTS)
    host.allreduce([np.zeros(5)])
    first, second, third = host.results[0].lend([LISTS, LISTS, LISTS], True)
    assert first is not None and second is not None and third is None
    assert first[0].ctypes.data != second[0].ctypes.data


@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
def test_nothing_is_lent_where_a_rank_does_not_want_it(host: Host, wanted: tuple[bool, bool]) -> None:
    for _ in range(5):
        assert host.allreduce(LISTS, wanted) == [None, None]
    for _ in range(2):
        host.allreduce(LISTS)
    assert None not in host.allreduce(LISTS, wanted), "what a rank wants is known one all-reduce later"
    assert host.allreduce(LISTS) == [None, None]
    assert None not in host.allreduce(LISTS)


def test_where_one_rank_has_no_memory_no_rank_is_lent_any(host: Host, monkeypatch: pytest.MonkeyPatch,
                                                          caplog: pytest.LogCaptureFixture) -> None:
    def refuse(nbytes: int, part: tuple[int, int]) -> None:
        raise OSError("no space")

    monkeypatch.setattr(host.results[1]._file, "take", refuse)
    with caplog.at_level(logging.WARNING):
        for _ in range(10):
            assert host.allreduce([np.zeros(2**20)]) == [None, None]
    warning, = caplog.messages
    assert warning.startswith("Rank 1: 8.0 MiB of memory cannot be shared with the other ranks of the host: no space.")


@pytest.mark.parametrize("first", range(4))
def test_ranks_agree_on_which_blocks_there_are_when_one_runs_out_of_memory(host: Host, first: int,
                                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    take, calls = host.results[1]._file.take, []

    def refuse(nbytes: int, part: tuple[int, int]) -> Any:
        calls.append(nbytes)
        if len(calls) > first:
            raise OSError("no space")
        return take(nbytes, part)

    monkeypatch.setattr(host.results[1]._file, "take", refuse)
    sizes = [1000, 2000, 3000]
    for _ in range(3):
        host.turn += 1

        def work(index: int) -> None:
            results = host.results[index]
            results.lend([[np.zeros(size)] for size in sizes], True)
            results.declare()
            host.memories[index].post(host.turn, PACKED, READY)
            host.memories[index].await_all(READY, host.turn)
            results.learn()
        list(host.threads.map(work, range(2)))
    lent = [results.lend([[np.zeros(size)] for size in sizes], True) for results in host.results]
    for number, (ours, theirs) in enumerate(zip(*lent, strict=True)):
        assert (ours is not None) == (theirs is not None) == (number < first)
        if ours is not None and theirs is not None:
            ours[0][...] = number + 1
            assert (theirs[0] == number + 1).all()


def test_memory_that_nobody_asks_for_is_given_back(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEPT_TURNS", 16)

    def in_use() -> int:
        return os.fstat(host.results[0]._file._descriptor).st_blocks * 512

    large = [np.zeros(2**20)]
    before = in_use()
    for _ in range(2):
        host.allreduce(large)
    held = host.allreduce(large)
    assert host.allreduce(large) == [None, None]
    assert in_use() - before == 2 * 8 * 2**20
    for _ in range(48):
        host.allreduce(LISTS)
    assert 8 * 2**20 <= in_use() - before < 9 * 2**20, "one is held by both ranks"
    held[0][0][...] = 3
    assert (held[1][0] == 3).all()
    held.clear()
    for _ in range(32):
        host.allreduce(LISTS)
    assert in_use() - before < 2**20


# -- through the data plane ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.float16])
def test_results_are_right_and_stay_so_for_as_long_as_anybody_has_them(count: int, dtype: type) -> None:
    group = ThreadGroup(count, LIMIT_S)
    planes = shared_memory_planes(list(range(count)), 4096, [group.data(rank) for rank in range(count)], LIMIT_S)
    sizes, steps = [40_000, 3, 70_001, 5_000], 40

    def work(rank: int) -> int:
        data, chance, kept, lent_before = planes[rank], random.Random(rank), [], 0
        for step in range(steps):
            sources = [np.full(size, step + rank + i, dtype) for i, size in enumerate(sizes)]
            lent, = data.lend([sources], True)
            lent_before += lent is not None
            targets = [np.empty_like(source) for source in sources] if lent is None else lent
            arguments: tuple = sources, targets, ReduceOp.SUM, 1.0, Scale(1.0, count) if step % 2 else IDENTITY
            if chance.random() < 0.5:
                prepared = data.prepare(*arguments)
                data.pack_ahead(prepared)
                data.finish(prepared, all_packed=False)
                del prepared
            else:
                data.allreduce(*arguments)
            kept.append((step, targets))
            del lent, targets, arguments
            if chance.random() < 0.5:
                del kept[:chance.randrange(len(kept) + 1)]
            for then, results in kept:
                for i, result in enumerate(results):
                    total = sum(then + other + i for other in range(count))
                    expected = np.asarray(total / count if then % 2 else total).astype(dtype)
                    np.testing.assert_array_equal(result, np.full(sizes[i], expected))
        return lent_before

    with ThreadPoolExecutor(count) as threads:
        numbers = list(threads.map(work, range(count)))
    assert len(set(numbers)) == 1 and numbers[0] > steps // 2


def test_a_small_part_of_what_is_lent_is_reduced_by_slices_too() -> None:
    """With an all-reduce of its own, as where the fusion threshold is 0: at once, all ranks would write all of it."""
    group = ThreadGroup(3, LIMIT_S)
    planes = shared_memory_planes([0, 1, 2], 4096, [group.data(rank) for rank in range(3)], LIMIT_S)

    def work(rank: int) -> list[int]:
        data, lent_sizes = planes[rank], []
        for step in range(60):
            sources = [np.full(size, step + rank + i) for i, size in enumerate((40_000, 1, 2, 200, 0))]
            lent, = data.lend([sources], True)
            targets = [np.empty_like(source) for source in sources] if lent is None else lent
            for source, target in zip(sources, targets, strict=True):
                arguments: tuple = [source], [target], ReduceOp.SUM, 1.0, Scale(2.0, 3)
                assert lent is None or not data.prepare(*arguments).is_packed
                data.allreduce(*arguments)
            for i, target in enumerate(targets):
                assert (target == 2 * (step + 1 + i)).all()
            lent_sizes += [] if lent is None else [target.size for target in targets]
            del lent, targets, target, arguments
        return lent_sizes

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(work, range(3)))
    assert found[0] == found[1] == found[2] and 1 in found[0]


def engines(count: int) -> list[Engine]:
    group = ThreadGroup(count, LIMIT_S)
    planes = shared_memory_planes(list(range(count)), SharedMemoryData.chunk_bytes,
                                  [group.data(rank) for rank in range(count)], LIMIT_S)
    return [Engine(rank, count, group.control(rank), planes[rank], Settings()) for rank in range(count)]


def run_on_all(found: list[Engine], work: Callable[[int, Engine], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(found)) as threads:
        done = list(threads.map(lambda rank: work(rank, found[rank]), range(len(found))))
        list(threads.map(lambda engine: engine.end(), found))
    return done


@pytest.mark.parametrize("in_graph", [(True, True), (True, False), (False, False)])
def test_results_outside_of_graphs_are_the_callers_own(in_graph: tuple[bool, bool]) -> None:
    def work(rank: int, engine: Engine) -> bool:
        shared = []
        for step in range(12):
            array = np.full(200_000, float(step + rank))
            # In the last steps on one rank alone, so that it meets with results that are lent.
            is_in_graph = in_graph[rank] or step < 6
            request = replace(allreduce_request("a", specs_of([array]), Average), in_graph=is_in_graph)
            result, = engine.run(request, [array]).wait(LIMIT_S)
            assert (result == step + 0.5).all()
            if is_in_graph:
                shared.append(isinstance(result.base.base, memoryview))
            else:
                result[...] = -1.0 - rank
            engine.run(allreduce_request("b", specs_of([array[:1]]), Average), [array[:1]]).wait(LIMIT_S)
            if not is_in_graph:
                assert (result == -1.0 - rank).all()
            del result
        return any(shared)

    assert run_on_all(engines(2), work) == [True, True]


def test_memory_of_ones_own_is_given_back_once_results_are_lent() -> None:
    """With both, a process would have the results twice."""
    def work(rank: int, engine: Engine) -> list[bool]:
        array, seen = np.ones(200_000), []
        request = replace(allreduce_request("a", specs_of([array]), Average), in_graph=True)
        own: Any = None
        for _ in range(8):
            result, = engine.run(request, [array]).wait(LIMIT_S)
            if isinstance(result.base.base, memoryview):
                seen.append(own() is None)
            else:
                own = weakref.ref(result.base)
            del result
        return seen

    for seen in run_on_all(engines(2), work):
        assert seen and all(seen)


def noting_lends(calls: list[Any]) -> Any:
    """A data plane that notes for how many lists it is asked to lend memory, and what is chosen."""
    return SimpleNamespace(lend=lambda lists, is_wanted: calls.append(len(lists)) or [None] * len(lists),
                           prepare=lambda *args: SimpleNamespace(is_packed=False), choose=calls.append)


def test_what_was_prepared_for_is_forgotten_before_another_backend_is_chosen() -> None:
    calls: list[Any] = []
    large, choice = np.ones(100_000), {"fusion_bytes": 2**20}
    executor = Executor(noting_lends(calls), 2, 2**20, SimpleNamespace())  # type: ignore[arg-type]
    executor.prepare(Entry(allreduce_request("a", specs_of([large]), Average), [large], Handle("a")))
    executor.choose(choice)
    assert calls == [1, 0, choice]


def test_what_was_prepared_for_is_forgotten_before_tensors_on_gpus_are_reduced() -> None:
    """They may be staged through the same data plane; and other ranks may have prepared nothing."""
    calls: list[Any] = []
    data = noting_lends(calls)
    gpu: Any = SimpleNamespace(execute=lambda entries: calls.append("gpu"))
    large = np.ones(100_000)
    executor = Executor(data, 2, 2**20, gpu)
    on_gpu = replace(allreduce_request("a", specs_of([np.ones(1)]), Average), device=DEVICE_GPU)
    executor.execute([Entry(on_gpu, [None], Handle("a"))])
    executor.prepare(Entry(allreduce_request("b", specs_of([large]), Average), [large], Handle("b")))
    for _ in range(2):
        executor.execute([Entry(on_gpu, [None], Handle("a"))])
    assert calls == ["gpu", 1, 0, "gpu", "gpu"]
