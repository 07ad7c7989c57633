"""Communicators are made on all ranks or on none, in time; here on one rank that asks itself how far it is."""

import threading
from contextlib import nullcontext
from typing import Any

import pytest

from mpistrat.core.errors import EngineError
from mpistrat.core.settings import Settings
from mpistrat.gpu.connect import connect, exchange_over
from mpistrat.gpu.nccl.communicators import make_communicators
from mpistrat.transport.local import ThreadGroup
from tests.support.gpu_stand_in import Device


class AnyDevice:
    """A GPU that need not be made the current one."""

    def current(self) -> Any:
        return nullcontext()


class Communicator:
    """Knows whether it was aborted."""

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def abort(self) -> None:
        self.aborted.set()


def alone(state: Any) -> list[Any]:
    """An exchange of one rank."""
    return [state]


def test_what_was_made_in_another_thread_is_returned() -> None:
    made = Communicator()
    threads = []

    def make() -> list[Any]:
        threads.append(threading.current_thread())
        return [made]

    assert make_communicators(make, AnyDevice(), 0, alone, 10.0) == [made]
    assert threads != [threading.current_thread()] and not made.aborted.is_set()


def test_an_error_names_the_rank_and_the_way_around_nccl() -> None:
    def make() -> list[Any]:
        raise EngineError("NCCL has failed (connecting rank 0 of 1): NCCL_ERROR_SYSTEM_ERROR. socketPollConnect")

    with pytest.raises(EngineError) as raised:
        make_communicators(make, AnyDevice(), 0, alone, 10.0)
    assert str(raised.value) == (
        "NCCL cannot connect the ranks: rank 0: NCCL has failed (connecting rank 0 of 1): NCCL_ERROR_SYSTEM_ERROR. "
        "socketPollConnect. MPISTRAT_GPU_OPERATIONS=staged does without NCCL.")


def test_a_rank_that_waits_in_nccl_leaves_when_another_one_fails_and_aborts_what_it_has_made_since() -> None:
    made, other_connects = Communicator(), threading.Event()

    def make() -> list[Any]:
        other_connects.wait(30)
        return [made]

    with pytest.raises(EngineError, match="NCCL cannot connect the ranks: rank 1: out of memory"):
        make_communicators(make, AnyDevice(), 0, lambda state: [state, "out of memory"], 10.0)
    assert not made.aborted.is_set()
    other_connects.set()
    assert made.aborted.wait(30)


def test_a_rank_that_is_connected_waits_for_the_others_and_aborts_when_one_of_them_fails() -> None:
    made = Communicator()
    states: list[Any] = [None, None, "out of memory"]

    with pytest.raises(EngineError, match="rank 1: out of memory"):
        make_communicators(lambda: [made], AnyDevice(), 0, lambda state: [state, states.pop(0)], 10.0)
    assert states == [] and made.aborted.wait(30)


def test_ranks_that_do_not_connect_in_time_say_so() -> None:
    times = iter([0.0, 1.0, 11.0])
    never = threading.Event()
    with pytest.raises(EngineError, match="rank 0: not connected after 10 s"):
        make_communicators(lambda: [never.wait(30)], AnyDevice(), 0, alone, 10.0, clock=lambda: next(times))
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
    nccl, _ = connect(device, 0, 1, exchange_over(host, 1), host, settings)
    assert nccl is not None
    assert given == [made] * 2
