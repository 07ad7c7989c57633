"""Communicators are made on all ranks or on none, in time; here on one rank that asks itself how far it is."""

import threading
import time
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from mpistrat.core.errors import EngineError
from mpistrat.core.interfaces import Observer
from mpistrat.core.settings import Settings
from mpistrat.core.topology import Topology
from mpistrat.gpu.assignment import set_cuda_variables
from mpistrat.gpu.connect import connect, exchange_over, make_communicators
from mpistrat.gpu.gpu_executor import GpuExecutor
from tests.support.gpu_stand_in import Device
from tests.support.thread_group import ThreadGroup


class Communicator:
    """Knows whether it was aborted. Its all-reduces are done at once, or only after an abort."""

    def __init__(self, device: Device | None = None) -> None:
        self.aborted, self.reduces = threading.Event(), 0
        self._device = device

    def allReduce(self, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None:  # noqa: N802
        self.reduces += count
        if self._device is not None:
            self._device.stream_at(stream).work.append(self.aborted.is_set)

    def check_async_error(self) -> None:
        """There is none."""

    def revoke(self) -> bool:
        return False

    def abort(self) -> None:
        self.aborted.set()


def alone(state: Any) -> list[Any]:
    return [state]


def test_a_rank_that_waits_in_nccl_leaves_when_another_one_fails_and_aborts_what_it_has_made_since() -> None:
    made, other_connects = Communicator(), threading.Event()

    def make() -> list[Any]:
        other_connects.wait(30)
        return [made]

    with pytest.raises(EngineError, match="NCCL cannot connect the ranks: rank 1: out of memory"):
        make_communicators(make, Device(), 0, lambda state: [state, "out of memory"], 10.0)
    assert not made.aborted.is_set()
    other_connects.set()
    assert made.aborted.wait(30)


def test_a_rank_that_is_connected_waits_for_the_others_and_aborts_when_one_of_them_fails() -> None:
    made = Communicator()
    states: list[Any] = [None, None, "out of memory"]

    with pytest.raises(EngineError, match="rank 1: out of memory"):
        make_communicators(lambda: [made], Device(), 0, lambda state: [state, states.pop(0)], 10.0)
    assert states == [] and made.aborted.wait(30)


def test_ranks_that_do_not_connect_in_time_say_so() -> None:
    times = iter([0.0, 1.0, 11.0])
    never = threading.Event()
    with pytest.raises(EngineError, match="rank 0: not connected after 10 s"):
        make_communicators(lambda: [never.wait(30)], Device(), 0, alone, 10.0, clock=lambda: next(times))
    never.set()


@pytest.mark.parametrize("made", [bytes(range(128)), tuple(range(128))], ids=["bytes", "tuple"])
def test_an_id_of_nccl_arrives_as_it_was_made(made: bytes | tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    device, given, communicator = Device(), [], Device.communicator

    def record(self: Device, size: int, unique_id: Any, rank: int) -> Any:
        given.append(unique_id)
        return communicator(self, size, unique_id, rank)

    monkeypatch.setattr(Device, "unique_id", lambda self: made)
    monkeypatch.setattr(Device, "communicator", record)
    host = ThreadGroup(1).data(0)
    settings = Settings(fusion_bytes=2**16, nccl_streams=2)
    nccl, _ = connect(device, Topology(0, ("",)), exchange_over(host, 1), host, settings, executor())
    assert nccl is not None and given == [made] * 2


def test_an_error_of_the_first_collective_is_an_error_of_all_ranks_while_they_connect() -> None:
    failing = Communicator(device := Device())
    failing.check_async_error = Mock(side_effect=EngineError("no room in /dev/shm"))  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="NCCL cannot connect the ranks: rank 0: no room in /dev/shm"):
        make_communicators(lambda: [failing], device, 0, alone, 10.0)
    assert failing.aborted.wait(30)


def test_a_rank_that_waits_in_the_first_collective_leaves_when_another_one_fails() -> None:
    device = Device()
    made = Communicator(device)
    with pytest.raises(EngineError, match="rank 1: out of memory"):
        make_communicators(lambda: [made], device, 0, lambda state: [state, "out of memory" if made.reduces else None],
                           10.0)
    assert made.aborted.is_set()


def test_a_communicator_is_aborted_after_the_thread_has_left_it_where_nccl_can_revoke() -> None:
    left, revoked = threading.Event(), threading.Event()

    class Revoked(Communicator):
        def allReduce(self, *_: object) -> None:  # noqa: N802
            self.reduces = 1
            revoked.wait(30)
            time.sleep(0.2)
            left.set()
            raise EngineError("revoked")

        def revoke(self) -> bool:
            revoked.set()
            return True

        def abort(self) -> None:
            assert left.is_set()
            super().abort()

    made = Revoked()
    with pytest.raises(EngineError, match="rank 1: out of memory"):
        make_communicators(lambda: [made], Device(), 0,
                           lambda state: [state, "out of memory" if made.reduces else None], 10.0)
    assert made.aborted.wait(30)


def test_of_two_process_sets_that_overlap_one_uses_nccl_and_it_may_be_the_other_one_afterwards(
        monkeypatch: pytest.MonkeyPatch) -> None:
    device, host, settings = Device(), ThreadGroup(1).data(0), Settings(fusion_bytes=2**16)

    def exchange(value: Any) -> list[Any]:
        other = list(value[0])
        other[0] = "another GPU"
        return [value, [other, []]]

    first, second = executor(), executor()
    monkeypatch.setattr("mpistrat.gpu.connect.make_communicators", lambda *_: [])
    monkeypatch.setattr("mpistrat.gpu.connect.NcclData", lambda *_: "NCCL")

    def choice(owner: GpuExecutor, operations: str = "auto") -> Any:
        return connect(device, Topology(0, ("",) * 2), exchange, host, replace(settings, gpu_operations=operations),
                       owner)[0]

    assert [choice(first), choice(second), choice(first)] == ["NCCL", None, "NCCL"]
    assert choice(second, "nccl") == "NCCL"
    first._device, second._device = device, device
    second.abandon()
    assert choice(second) is None
    first.abandon()
    assert [choice(second), choice(first)] == ["NCCL", None]
    del second
    assert choice(first) == "NCCL"


def executor() -> GpuExecutor:
    return GpuExecutor(Topology(0, ("",)), ThreadGroup(1).data(0), Settings(), Observer())


def test_variables_of_cuda_are_set_unless_the_user_has_set_them() -> None:
    environ: dict[str, str] = {}
    set_cuda_variables(environ, 1)
    assert environ == {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER",
                       "TF_USE_DETERMINISTIC_SEGMENT_REDUCTIONS": "1"}
    own = dict.fromkeys(environ, "of the user")
    environ = dict(own)
    set_cuda_variables(environ, 2)
    assert environ == {**own, "NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
