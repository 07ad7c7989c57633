"""Which way GPU tensors go, and what happens when a GPU is short of memory, slow or broken, on a stand-in."""

import logging
import threading
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest

from mpistrat.api.tensors import Cupy
from mpistrat.core.arithmetic import Reduction
from mpistrat.core.errors import EngineError
from mpistrat.core.handle import Handle
from mpistrat.core.install import pip_extra
from mpistrat.core.interfaces import Observer
from mpistrat.core.request import (
    DEVICE_GPU,
    Product,
    ReduceOp,
    ScaledOp,
    Sum,
    allgather_request,
    allreduce_request,
    reducescatter_request,
    specs_of,
)
from mpistrat.core.settings import Settings
from mpistrat.core.topology import Topology
from mpistrat.gpu import gpu_executor, proof
from mpistrat.gpu.arrays import BucketList, GpuArray, GpuTensors
from mpistrat.gpu.backend import StagedData, Watchdog
from mpistrat.gpu.connect import SHARES_GPUS, GpuInfo, connect, fusion_buffers, why_not_nccl
from mpistrat.gpu.gpu_executor import Batch, GpuExecutor
from mpistrat.gpu.nccl_data import FLOAT16, FLOAT64, UINT8
from mpistrat.gpu.proof import RefutedError, UnprovenError, check_waiting
from mpistrat.trace.records import OperationRing
from tests.support.copy_model import memory_at
from tests.support.engines import make_engine
from tests.support.gpu_backends import allreduce
from tests.support.gpu_stand_in import Communicator, Device, Event
from tests.support.thread_group import ThreadGroup

FOUND = GpuInfo("gpu 0", 22805, 2**27, False)
OTHER = FOUND._replace(gpu="gpu 1")


# -- which way --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks, reason", [
    ([FOUND, OTHER._replace(nccl=0)], f"ranks [1] have no NCCL ({pip_extra('gpu')})"),
    ([FOUND, OTHER._replace(nccl=0, problem="RuntimeError: no driver")],
     "NCCL cannot be used (rank 1: RuntimeError: no driver)"),
    ([FOUND, OTHER._replace(nccl=22900)], "the ranks have different versions of NCCL: 22805, 22900"),
    ([OTHER, FOUND, FOUND], "ranks [1, 2] share a GPU, which NCCL allows from 2.30 on, with "
                            "NCCL_MULTI_RANK_GPU_ENABLE=1"),
    ([FOUND, OTHER._replace(buffer_bytes=0)], "the GPUs of ranks [1] have no memory left for fusion buffers"),
])
def test_what_keeps_nccl_from_serving_is_named(ranks: list[GpuInfo], reason: str) -> None:
    assert why_not_nccl(ranks, "auto") == reason
    with pytest.raises(EngineError) as raised:
        why_not_nccl(ranks, "nccl")
    assert str(raised.value) == f"MPISTRAT_GPU_OPERATIONS=nccl: {reason}"


@pytest.mark.parametrize("version, may_share, serves", [
    (SHARES_GPUS, True, True), (SHARES_GPUS, False, False), (SHARES_GPUS - 1, True, False)])
def test_ranks_may_share_a_gpu_where_nccl_and_the_environment_let_them(version: int, may_share: bool,
                                                                       serves: bool) -> None:
    found = FOUND._replace(nccl=version, may_share=may_share)
    assert (why_not_nccl([found, found], "auto") == "") == serves


# -- one rank, driven by hand -----------------------------------------------------------------------------------------


class Job:
    """An engine of one rank without a thread, with a stand-in for its GPU."""

    def __init__(self, device: Device | None = None, **settings: Any):
        self.device = device or Device()
        self.now = 0.0
        group = ThreadGroup(1)
        chosen = Settings(**{"fusion_bytes": 2**16, "disable": "shadow", **settings})
        self.executor = GpuExecutor(Topology(0, ("",)), group.data(0), chosen, Observer(), clock=lambda: self.now)
        self.engine = make_engine(0, 1, group.control(0), group.data(0), chosen, clock=lambda: self.now,
                                  device=self.executor)

    def input(self, *values: np.ndarray, keeps_shapes: bool = True) -> GpuTensors:
        """The values, as door C hands them over."""
        device: Any = self.device
        tensors = Cupy().on_gpu([self.device.tensor(value) for value in values], device)
        tensors.prepare(keeps_shapes)
        return tensors

    def submit(self, name: str, *values: np.ndarray, wire: str = "",
               bucket: tuple[BucketList, int] | None = None) -> Handle:
        arrays = self.input(*values)
        arrays.bucket = bucket
        request = allreduce_request(name, specs_of(arrays), ScaledOp(Sum), device=DEVICE_GPU, wire_dtype=wire)
        return self.engine.submit(request, arrays)

    def connected(self) -> "Job":
        self.submit("connect", np.ones(1))
        self.settle()
        return self

    def settle(self) -> None:
        idle = 0
        while idle < 50:
            idle = 0 if self.engine.controller.run_cycle() else idle + 1


def values_of(handle: Handle) -> list[list[float]]:
    """The values of a finished all-reduce, when the caller's stream has come to them."""
    results = handle.wait(0)
    results[0].device.synchronize()
    return [array.view().tolist() for array in results]


def test_completed_by_the_host_a_handle_is_done_when_the_gpu_is_and_not_before() -> None:
    job = Job(disable="stream_order,shadow")
    handle = job.submit("a", np.arange(3.0), np.ones(2))
    job.engine.controller.run_cycle()
    assert not handle.is_done
    job.settle()
    assert values_of(handle) == [[0, 1, 2], [1, 1]]


def test_a_step_records_as_many_events_for_many_tensors_as_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = []
    for count in (1, 100):
        job = Job().connected()
        calls: list[Any] = []
        record = job.device.record
        monkeypatch.setattr(job.device, "record", lambda *streams, record=record, calls=calls: (
            calls.append(streams) or record(*streams)))
        handle = job.submit("many", *[np.ones(2)] * count)
        job.device.run_all()  # the tensors' contents, one after the other
        job.settle()
        assert values_of(handle) == [[1, 1]] * count
        recorded.append(len(calls))
    assert recorded == [2, 4]  # One tensor needs no copies, and so one stream of ours.


def test_tensors_that_travel_in_different_dtypes_are_not_fused() -> None:
    job = Job()
    handles = [job.submit(name, np.full(2, 0.1), wire=wire) for name, wire in zip("abc", ("", "float16", "float16"))]
    job.settle()
    assert [entry[1:3] for entry in job.device.log if entry[0] == "allReduce"] == [
        (1, UINT8), (2, FLOAT64), (16, FLOAT16)]  # The first one connects.
    assert [values_of(handle)[0][0] == 0.1 for handle in handles] == [True, False, False]


def test_with_little_memory_tensors_are_fused_less(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(Device(free_bytes=5 * 2**20), fusion_bytes=2**24)
    with caplog.at_level(logging.INFO, "mpistrat"):
        first = job.submit("a", np.ones(2**18), np.ones(2**18))
        job.settle()
    assert values_of(first)[1][:2] == [1, 1]
    assert [line for line in caplog.messages if "GPU memory is short" in line] == [
        f"rank 0: GPU memory is short: tensors are fused up to {(2**24 + 2**16) // 8 - 2**16} bytes instead of {2**24}"]


def test_ranks_that_share_a_gpu_are_staged_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    device = Device()

    def exchange(value: Any) -> list[Any]:
        return [value, value]  # as if another rank had found the same GPU

    with caplog.at_level(logging.INFO, "mpistrat"):
        nccl, fusion_bytes = connect(device, Topology(0, ("",) * 2), exchange, ThreadGroup(1).data(0),
                                     Settings(fusion_bytes=2**16), Job().executor)
    assert (nccl, fusion_bytes) == (None, 2**16)
    assert [(record.levelname, record.message) for record in caplog.records] == [(
        "INFO", "rank 0: GPU tensors are staged through host memory and reduced by local: ranks [0, 1] share a GPU, "
                "which NCCL allows from 2.30 on, with NCCL_MULTI_RANK_GPU_ENABLE=1")]
    assert device.free_bytes == 2**40, "buffers that are not used are given back"


def test_no_buffers_are_kept_where_there_is_no_room_for_all() -> None:
    device = Device(free_bytes=2**20)
    assert fusion_buffers(device, 2**24, 6) == ([], 0)
    assert device.free_bytes == 2**20


@pytest.mark.parametrize(("free_bytes", "method", "error", "text"), [
    (1000, "unused", None, ": the GPUs of ranks [0] have no memory left for fusion buffers"),
    (2**40, "unique_id", RuntimeError("no socket interface found"),
     ": NCCL cannot be used (rank 0: RuntimeError: no socket interface found)"),
    (2**40, "compile", EngineError("a CUDA kernel cannot be compiled"),
     ": NCCL cannot be used (rank 0: EngineError: a CUDA kernel cannot be compiled)")],
    ids=["memory", "socket", "compiler"])
def test_without_memory_and_with_an_error_tensors_are_staged_with_one_warning(
        free_bytes: int, method: str, error: Exception | None, text: str, monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(Device, method, Mock(side_effect=error), raising=False)
    job = Job(Device(free_bytes=free_bytes))
    for name in "ab":
        handle = job.submit(name, np.ones(2), np.ones(3))
        job.settle()
        assert values_of(handle) == [[1, 1], [1, 1, 1]]
    warning, = caplog.records
    assert warning.levelname == "WARNING" and warning.message.endswith(text)
    assert warning.message.startswith("rank 0: GPU tensors are staged through host memory and reduced by local")


def test_a_list_of_tensors_of_one_stream_is_one_wait_of_each_stream_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    job, waits = Job(nccl_streams=1).connected(), []
    monkeypatch.setattr(Device, "wait", lambda self, stream, event: waits.append(stream.ptr))
    job.submit("a", *[np.ones(2)] * 20)
    job.engine.controller.run_cycle()
    # NCCL's copies, two between the copies and the reduction; at the end the caller's stream.
    assert len(waits) == 4 and waits[-1] == job.device.current_stream().ptr


def test_a_guarded_call_that_has_ended_is_not_aborted() -> None:
    aborted = threading.Event()
    watchdog = Watchdog(0.05, lambda: False, aborted.set, "too late")
    for _ in range(20):
        with watchdog:
            pass
    assert not aborted.wait(0.3)
    with pytest.raises(EngineError, match="too late"), watchdog:
        assert aborted.wait(30)
    watchdog.close()


def test_a_guarded_call_that_a_revoke_ends_is_not_aborted_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpistrat.gpu.backend.WATCHDOG_REVOKE_S", 0.2)
    revoked, aborted = threading.Event(), threading.Event()
    watchdog = Watchdog(0.05, lambda: revoked.set() or True, aborted.set, "too late")
    with pytest.raises(EngineError, match="too late"), watchdog:
        assert revoked.wait(30)
    assert not aborted.wait(0.4)


@pytest.mark.parametrize("returns", [True, False])
def test_a_guarded_call_that_a_revoke_does_not_end_is_aborted(returns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpistrat.gpu.backend.WATCHDOG_REVOKE_S", 0.1)
    for_ever, aborted = threading.Event(), threading.Event()
    watchdog = Watchdog(0.05, (lambda: True) if returns else for_ever.wait, aborted.set, "too late")
    with pytest.raises(EngineError, match="too late"), watchdog:
        assert aborted.wait(30)
    for_ever.set()


def watchdogs() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "mpistrat-gpu-watchdog"}


def test_what_nccl_lacks_is_staged_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    with caplog.at_level(logging.INFO, "mpistrat"):
        for _ in range(2):
            arrays = job.input(np.array([2j, 1.0]))
            job.engine.submit(allreduce_request("a", specs_of(arrays), ScaledOp(Product), device=DEVICE_GPU), arrays)
            job.settle()
    assert [line for line in caplog.messages if "some GPU tensors" in line] == [
        "rank 0: some GPU tensors are staged through host memory: NCCL has no product of complex128"]


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives end when they are aborted, as if another rank had died after it was connected."""
    with_all = Communicator._with_all

    def never_end(self: Communicator, source: int, count: int, dtype: np.dtype, stream: int, use: Any) -> None:
        if dtype == np.uint8:
            with_all(self, source, count, dtype, stream, use)
        else:
            self._device.stream_at(stream).work.append(lambda: ("abort",) in self._device.log)

    monkeypatch.setattr(Communicator, "_with_all", never_end)


@pytest.fixture(params=["stream_order,shadow", "shadow"])
def stuck(request: pytest.FixtureRequest, endless: None) -> Job:
    """A job whose collectives never end, for which the host waits, or the caller's stream."""
    return Job(stall_warning_s=1.0, stall_abort_s=10.0, disable=request.param)


def next_of(job: Job, handle: Handle) -> Handle:
    """The handle that gets an error of the GPU's work on another one: the same, or the next, if that is done."""
    return job.submit("next", np.ones(3)) if handle.is_done else handle


def test_a_gpu_that_does_not_get_done_ends_the_engine_in_time(stuck: Job) -> None:
    handle = stuck.submit("a/b", np.ones(3))
    stuck.settle()
    stuck.now = 9.0
    stuck.settle()
    stuck.now = 11.0
    waiting = next_of(stuck, handle)
    stuck.engine.start()
    with pytest.raises(EngineError, match=r"the GPU of rank 0 has not finished a/b in 11 s; another rank may"):
        waiting.wait(30)
    stuck.engine.end()
    assert ("abort",) in stuck.device.log


@pytest.mark.usefixtures("endless")
@pytest.mark.parametrize("count", [1, 2], ids=["reduced directly", "packed"])
def test_results_that_were_handed_over_are_nan_when_the_collective_is_aborted(count: int) -> None:
    job = Job(stall_warning_s=1.0, stall_abort_s=10.0)
    handle = job.submit("a", *[np.ones(3)] * count)
    job.settle()
    assert handle.is_done
    job.executor.abandon()
    assert np.isnan(values_of(handle)).all()


def test_streams_that_do_not_wait_are_not_relied_on_and_a_warning_says_so(monkeypatch: pytest.MonkeyPatch,
                                                                         caplog: pytest.LogCaptureFixture) -> None:
    wait = Device.wait
    monkeypatch.setattr(Device, "wait", lambda self, stream, event: stream.ptr == 2 or wait(self, stream, event))
    with pytest.raises(RefutedError, match="a stream read memory before it was written: 0 instead of 77"):
        check_waiting(device := Device(), cast("GpuArray", device.scratch(192)))
    monkeypatch.undo()
    device = Device()
    check_waiting(device, cast("GpuArray", device.scratch(1)))  # It is too small.
    monkeypatch.setattr(gpu_executor, "check_waiting", Mock(side_effect=EngineError("too early")))
    caplog.set_level("INFO", gpu_executor.__name__)
    job = Job()
    handle = job.submit("a", np.ones(3))
    job.engine.controller.run_cycle()
    assert not handle.is_done
    job.settle()
    assert values_of(handle) == [[1, 1, 1]]
    warning, = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning == "rank 0: the host waits for results of GPU collectives, because the check of CUDA streams has " \
        "not passed: too early"
    assert "rank 0: GPU checks: check of CUDA streams not passed: too early" in caplog.messages


def test_work_that_is_over_before_it_is_raced_with_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "_LONGEST_S", 0.0)
    given, copy, wait = [], Device.copy, Device.wait

    def over_at_once(self: Device, *of: Any) -> None:
        given.append(of)
        copy(self, *of)
        self.run_all()

    monkeypatch.setattr(Device, "copy", over_at_once)
    with pytest.raises(UnprovenError, match="the GPU finished 40 steps of work too early"):
        check_waiting(device := Device(), cast("GpuArray", device.scratch(192)))
    monkeypatch.setattr(Device, "wait", lambda self, stream, event: None)
    with pytest.raises(UnprovenError):  # As before: it would not be found.
        check_waiting(device := Device(), cast("GpuArray", device.scratch(192)))
    monkeypatch.setattr(Device, "wait", wait)
    given.clear()
    monkeypatch.setattr(proof, "_LONGEST_S", 60.0)
    monkeypatch.setattr(Device, "copy", lambda self, *of: (over_at_once if len(given) < 100 else copy)(self, *of))
    check_waiting(device := Device(), cast("GpuArray", device.scratch(192)))  # With more work it still runs.


def test_between_the_submission_and_the_end_of_a_step_nothing_waits_allocates_or_polls(
        monkeypatch: pytest.MonkeyPatch) -> None:
    job, calls = Job(), []
    arrays = [np.ones(2), np.ones(300)]
    for name in ("first", "second"):
        job.submit(name, *arrays)
        job.settle()
    tensors = job.input(*arrays)
    for name in ("scratch", "pinned", "empty_all", "synchronize", "run_a_little", "stream", "copy"):
        monkeypatch.setattr(job.device, name, lambda *of, name=name: calls.append(name))
    monkeypatch.setattr(Event, "done", property(lambda self: calls.append("done")))
    request = allreduce_request("second", specs_of(tensors), ScaledOp(Sum), device=DEVICE_GPU)
    handle = job.engine.submit(request, tensors)
    monkeypatch.setattr(job.executor, "_release", lambda but: None)  # comes after it
    job.engine.controller.run_cycle()
    assert handle.is_done and calls == []
    monkeypatch.undo()
    assert values_of(handle) == [[1] * 2, [1] * 300]


def test_memory_is_given_back_where_the_streams_keep_it_from_being_used_too_early() -> None:
    job = Job()
    first = job.submit("a", np.ones(3))
    job.settle()
    results = first.wait(0)
    assert len(job.executor.kept) == 1 and job.device.used_bytes == results[0].memory.nbytes
    del first, results
    assert job.device.used_bytes == 0
    job.device.run_all()


def test_memory_is_kept_until_the_gpu_is_done_and_then_freed_and_the_operation_is_over(
        monkeypatch: pytest.MonkeyPatch) -> None:
    job, ring = Job(), OperationRing(10)
    monkeypatch.setattr(Batch, "release", lambda self: None)  # as with tensors of several streams
    job.executor._observer = ring
    first = job.submit("a", np.ones(3))
    job.settle()
    used = job.device.used_bytes
    assert first.is_done and len(job.executor.kept) == 1 and ring.since(0) == []
    del first
    assert job.device.used_bytes == used
    job.now = 1.0  # Later an idle engine looks again.
    job.device.run_all()
    job.settle()
    assert not job.executor.kept and job.device.used_bytes == 0
    operation, = ring.since(0)
    assert operation.request.name == "a" and operation.nbytes == 24 and operation.began <= operation.ended


def test_what_is_to_be_kept_for_ever_waits_for_the_gpu() -> None:
    job = Job()
    handle = job.submit("a", np.ones(3))
    job.settle()
    assert handle.is_done and job.executor.kept
    job.executor.await_kept()
    assert all(end.has_fired for batch in job.executor.kept for end in batch.ends)
    job.device.synchronize()
    assert handle.wait(0)[0].view().tolist() == [1, 1, 1]


@pytest.mark.parametrize("is_alone", [True, False])
def test_of_sets_that_overlap_only_one_is_complete_before_the_gpu_is(is_alone: bool,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    def connected(*of: Any) -> Any:
        nccl, fusion_bytes = connect(*of)
        nccl.is_alone = is_alone
        return nccl, fusion_bytes

    monkeypatch.setattr(gpu_executor, "connect", connected)
    job = Job()
    handle = job.submit("a", np.ones(3))
    job.engine.controller.run_cycle()
    assert handle.is_done == is_alone
    job.settle()
    assert values_of(handle) == [[1, 1, 1]]


@pytest.mark.usefixtures("endless")
@pytest.mark.parametrize("no_limit", [{"stall_check_disable": True}, {"stall_abort_s": 0.0}],
                         ids=["no check of stalls", "no limit"])
def test_without_a_limit_a_gpu_is_waited_for_and_no_watchdog_is_made(no_limit: dict[str, Any]) -> None:
    before, job = watchdogs(), Job(**no_limit)
    job.submit("a/b", np.ones(3))
    for job.now in (1.0, 10 * Settings().stall_abort_s):
        job.settle()
        assert len(job.executor.kept) == 1
    assert watchdogs() <= before
    assert ("abort",) not in job.device.log


@pytest.mark.parametrize("method", ["revoke", "abort"])
def test_a_call_of_nccl_that_does_not_return_is_ended_in_time(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def wait_for_the_others(self: Communicator, *arguments: Any) -> None:
        assert ended.wait(30), "nobody has ended it"
        raise RuntimeError("NCCL_ERROR_REMOTE_ERROR")

    job = Job(stall_warning_s=0.1, stall_abort_s=0.2).connected()
    monkeypatch.setattr(Communicator, "allReduce", wait_for_the_others)
    monkeypatch.setattr(Communicator, "revoke", lambda self: False)  # as before ncclCommRevoke
    monkeypatch.setattr(Communicator, method, lambda self: ended.set() or True)
    job.engine.start()
    with pytest.raises(EngineError, match=r"NCCL has kept rank 0 waiting for 0\.2 s; another rank may have died"):
        job.submit("a", np.ones(3)).wait(30)


def test_memory_is_kept_when_only_some_of_the_work_could_be_enqueued(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(nccl_streams=1, fusion_bytes=0).connected()
    calls = []

    def fail_second(self: Communicator, *arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(Communicator, "allReduce", fail_second)
    handle = job.submit("a", np.ones(3), np.ones(4))
    job.engine.start()
    with pytest.raises(EngineError, match="out of memory"):
        handle.wait(30)
    job.engine.end()
    given = {arguments[1] for arguments in calls}
    assert given == {address for work in job.executor._underway for address in work.made.addresses}


@pytest.mark.parametrize("can_wait", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_after_a_failure_nothing_writes_to_memory_that_is_used_again(can_wait: bool, seed: int,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "can_wait", lambda self, stream: can_wait)
    job = Job(Device(seed=seed), nccl_streams=1, fusion_bytes=0).connected()
    all_reduce, calls = Communicator.allReduce, []

    def fail_third(self: Communicator, *arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        all_reduce(self, *arguments)

    monkeypatch.setattr(Communicator, "allReduce", fail_third)
    handle = job.submit("a", np.full(3, 0.1), np.ones(4), np.ones(5))
    job.engine.start()
    with pytest.raises(EngineError, match="out of memory"):
        handle.wait(30)
    memory = [memory_at(address, 3, np.dtype(np.float64)) for _, address, *_ in calls]
    for again in memory:
        if can_wait:  # Work that is enqueued behind the failure, as that which restores weights is.
            job.device.enqueue(job.device.current_stream(), lambda again=again: again.fill(7.0))
        else:
            again.fill(7.0)
    job.device.run_all()
    assert [again.tolist() for again in memory] == [[7.0] * 3] * 3
    job.engine.end()


def test_communicators_are_aborted_when_other_ranks_have_died_meanwhile(stuck: Job) -> None:
    handle = stuck.submit("a", np.ones(3))
    stuck.settle()
    stuck.engine.start()
    stuck.engine.abandon("rank 1 has died")
    with pytest.raises(EngineError, match="rank 1 has died"):
        next_of(stuck, handle).wait(30)
    assert ("abort",) in stuck.device.log


def test_an_asynchronous_error_of_nccl_ends_the_engine(stuck: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = stuck.submit("a", np.ones(3))
    stuck.settle()
    monkeypatch.setattr(Communicator, "check_async_error", Mock(side_effect=RuntimeError("NCCL_ERROR_REMOTE_ERROR")))
    stuck.now += 1.0
    waiting = next_of(stuck, handle)
    stuck.engine.start()
    with pytest.raises(EngineError, match="NCCL_ERROR_REMOTE_ERROR"):
        waiting.wait(30)
    with pytest.raises(EngineError, match="NCCL_ERROR_REMOTE_ERROR"):
        stuck.submit("b", np.ones(3))


def test_what_was_enqueued_before_a_shutdown_is_completed() -> None:
    job = Job()
    handle = job.submit("a", np.ones(3))
    job.engine.start()
    job.engine.end()
    assert values_of(handle) == [[1, 1, 1]]
    job.executor.close()
    job.executor.close()
    assert job.device.log[-1] == ("destroy",)
    assert job.device.free_bytes == 2**40  # The next job on this GPU has the memory of the fusion buffers again.


@pytest.mark.parametrize("make", [allgather_request, partial(reducescatter_request, scaled=ScaledOp(Sum))],
                         ids=["allgather", "reducescatter"])
def test_a_rank_without_memory_for_gathered_rows_fails_before_the_first_collective(make: Any) -> None:
    job = Job(nccl_streams=1)
    first = job.submit("a", np.ones(3))
    arrays = job.input(np.ones((2, 3)), keeps_shapes=False)
    arrays.allocate = Mock(side_effect=MemoryError("the GPU has no memory left"))
    second = job.engine.submit(replace(make("b", specs_of(arrays)), device=DEVICE_GPU), arrays)
    job.engine.start()
    for handle in (first, second):
        with pytest.raises(EngineError, match="no memory left"):
            handle.wait(30)
    assert [entry[1:3] for entry in job.device.log if entry[0] == "allReduce"] == [(1, UINT8)]  # This one connects.


# -- buckets of a list ------------------------------------------------------------------------------------------------


def test_the_buckets_of_a_list_are_waited_for_together_when_the_last_one_is_enqueued(
        monkeypatch: pytest.MonkeyPatch) -> None:
    job, list_, reader_waits = Job().connected(), BucketList(3), []
    wait = Device.wait
    monkeypatch.setattr(Device, "wait", lambda self, stream, event: (
        reader_waits.append(event) if stream is self.current_stream() else None, wait(self, stream, event)))
    handles = []
    for number in (1, 2, 0):  # The ranks agree on any order.
        assert not reader_waits and not any(handle.is_done for handle in handles)
        handles.append(job.submit(str(number), np.full(3, 1.0 + number), bucket=(list_, number)))
        job.engine.controller.run_cycle()
    assert all(handle.is_done for handle in handles) and 0 < len(reader_waits) <= 2
    assert [values_of(handle)[0][0] for handle in handles] == [2, 3, 1]


def test_a_bucket_that_the_gpu_has_done_does_not_wait_for_its_list() -> None:
    job, list_ = Job(), BucketList(2)
    first = job.submit("0", np.ones(3), bucket=(list_, 0))
    job.engine.controller.run_cycle()
    job.device.run_all()
    assert not first.is_done
    job.now += 1.0  # An idle engine looks now and then.
    job.settle()
    assert values_of(first) == [[1, 1, 1]]
    last = job.submit("1", np.ones(3), bucket=(list_, 1))
    job.settle()
    assert values_of(last) == [[1, 1, 1]] and not job.executor._lists


def test_a_list_of_which_an_execution_has_enqueued_some_begins_anew_in_the_next_one() -> None:
    job, list_ = Job(), BucketList(2)
    lost = job.submit("0", np.ones(3), bucket=(list_, 0))
    job.engine.controller.run_cycle()
    first = job.submit("0 again", np.ones(3), bucket=(list_, 0))
    job.engine.controller.run_cycle()
    assert lost.is_done and not first.is_done
    last = job.submit("1", np.ones(3), bucket=(list_, 1))
    job.engine.controller.run_cycle()
    assert [values_of(handle) for handle in (lost, first, last)] == [[[1, 1, 1]]] * 3


def test_two_buckets_of_a_list_and_another_request_may_be_enqueued_together() -> None:
    job, list_ = Job(), BucketList(3)
    handles = [job.submit(str(number), np.ones(3), bucket=(list_, number)) for number in (0, 1)]
    alone = job.submit("alone", np.ones(3))
    job.engine.controller.run_cycle()
    assert alone.is_done and not any(handle.is_done for handle in handles)
    handles.append(job.submit("2", np.ones(3), bucket=(list_, 2)))
    job.engine.controller.run_cycle()
    assert [values_of(handle) for handle in [*handles, alone]] == [[[1, 1, 1]]] * 4


# -- what the path proves ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["unpack", "stream", "NCCL"])
def test_known_numbers_that_come_out_wrong_when_nccl_is_connected_stage_all_tensors(
        wrong: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    copy, wait, all_reduce = Device.batched_copy, Device.wait, Communicator.allReduce
    if wrong == "unpack":  # The last tensor is left out.
        monkeypatch.setattr(Device, "batched_copy", lambda self, table, *of: copy(self, table[:-1], *of))
    elif wrong == "stream":  # The copies do not wait for the reduction.
        monkeypatch.setattr(Device, "wait", lambda self, stream, event: (stream.ptr == 3 or wait(self, stream, event)))
    else:
        def off_by_one(self: Communicator, source: int, target: int, *of: int) -> None:
            all_reduce(self, source, target, *of)
            stream = self._device.stream_at(of[-1])
            self._device.enqueue(stream, lambda: memory_at(target, 1, np.dtype(np.uint8)).fill(1))

        monkeypatch.setattr(Communicator, "allReduce", off_by_one)
    job = Job(disable="none", fusion_bytes=2**18)
    handle = job.submit("a", np.ones(2), np.ones(3))
    job.settle()
    assert values_of(handle) == [[1, 1], [1, 1, 1]]
    warning, = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("rank 0: GPU tensors are staged through host memory and reduced by local, since NCCL "
                              "gives wrong numbers: rank 0: sum of float32: tensor ")
    assert ("abort",) in job.device.log
    with pytest.raises(EngineError, match="MPISTRAT_GPU_OPERATIONS=nccl: NCCL gives wrong numbers: rank 0: sum of"):
        broken = Job(disable="none", fusion_bytes=2**18, gpu_operations="nccl")
        broken.submit("a", np.ones(2))
        broken.engine.controller.run_cycle()


def test_the_first_two_buckets_of_a_kind_are_reduced_on_the_cpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    job, reduced = Job(disable="none"), []
    host = job.executor._host
    allreduce = host.allreduce
    monkeypatch.setattr(host, "allreduce", lambda sources, *of: (reduced.append(len(sources)), allreduce(sources, *of)))
    for number in range(4):
        handles = [job.submit(f"{number} {kind}", np.full(3, 0.1), np.full(5, 7.0), wire=kind)
                   for kind in ("", "float16")]
        job.settle()
        assert [round(values_of(handle)[0][0], 3) for handle in handles] == [0.1, 0.1]
    assert reduced == [2] * 4


def test_a_bucket_that_is_wrong_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(disable="none")
    job.submit("right", np.ones(3), np.ones(2))
    job.settle()
    copy = Device.batched_copy
    monkeypatch.setattr(Device, "batched_copy", lambda self, table, *of: copy(self, table[:1], *of))
    handle = job.submit("layer/kernel", np.full(3, 2.0), np.full(5, 7.0))
    job.engine.start()
    with pytest.raises(EngineError, match=r"NCCL's results differ .* on the CPU: rank 0: layer/kernel, element 0: .* "
                                          r"instead of 7\.0\. Check the GPUs .*MPISTRAT_DISABLE=shadow switches"):
        handle.wait(30)


@pytest.mark.parametrize("dtype, given, found, is_wrong", [
    ("float32", [np.inf, np.nan, -np.inf, 1], [np.inf, np.nan, -np.inf, 1], False),
    ("float32", [1, 2, 3, 4], [1, 2, np.nan, 4], True), ("float32", [1, np.nan, 3, 4], [1, 2, 3, 4], True),
    ("float32", [np.inf, 2, 3, 4], [-np.inf, 2, 3, 4], True), ("float32", [np.inf, 2, 3, 4], [np.inf, 2, 3.1, 4], True),
    ("float16", [1, 2, 3, 4], [1, 2, np.inf, 4], True),
    ("float16", [65504, 2, 3, 4], [np.inf, 2, 3, 4], False)])  # Other ranks' numbers may overflow with it.
def test_results_that_are_not_finite_are_compared_too(
        dtype: str, given: list[float], found: list[float], is_wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    job, all_reduce = Job(disable="none").connected(), Communicator.allReduce

    def write(self: Communicator, source: int, target: int, *of: int) -> None:
        all_reduce(self, source, target, *of)
        values = np.array(found, dtype)
        self._device.enqueue(self._device.stream_at(of[-1]), lambda: np.copyto(
            memory_at(target, values.size, values.dtype), values))

    monkeypatch.setattr(Communicator, "allReduce", write)
    handle = job.submit("a", np.array(given, dtype))
    job.engine.start()
    with pytest.raises(EngineError, match=r"NCCL's results differ .* a, element") if is_wrong else nullcontext():
        handle.wait(30)


def test_several_communicators_of_an_old_nccl_are_warned_about(monkeypatch: pytest.MonkeyPatch,
                                                               caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(Device, "nccl_version", lambda self: 22505)
    for streams in (1, 2):
        job = Job(nccl_streams=streams)
        handle = job.submit("a", np.ones(2))
        job.settle()
        assert values_of(handle) == [[1, 1]]
    assert [record.message[:38] for record in caplog.records if record.levelname == "WARNING"] == [
        "rank 0: MPISTRAT_NUM_NCCL_STREAMS=2: N"]


def test_the_memory_of_a_rank_that_has_joined_is_kept_until_the_gpu_is_done() -> None:
    job = Job().connected()
    free = job.device.free_bytes
    tensors: Any = job.executor.uploaded([np.zeros(3)])
    request = allreduce_request("a", specs_of(tensors), ScaledOp(Sum), device=DEVICE_GPU)
    handle = job.engine.submit(request, tensors)
    del tensors
    job.engine.controller.run_cycle()
    assert handle.is_done
    del handle
    assert job.device.free_bytes == free - 2 * 24
    job.device.run_all()
    job.now += 1.0
    job.settle()
    assert job.device.free_bytes == free


def test_a_copy_that_never_ends_is_an_error() -> None:
    device = Device()
    plane = StagedData(device, 0, ThreadGroup(1).data(0), 0.05)
    source = device.seen(device.tensor(np.ones(3)))
    never = device.record(device.stream())
    never.fire = lambda: False  # type: ignore[method-assign]
    device._streams[-1].work.clear()
    plane.wait_for([never])
    with pytest.raises(EngineError, match=r"a copy between GPU and host is not complete after 0\.05 s"):
        allreduce(plane, [source], [source], Reduction(ReduceOp.SUM))
