"""Engines for tests, wired as `init` wires them, whose ranks are in one process."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from mpistrat.core.handle import Handle
from mpistrat.core.interfaces import AgreementRound, ControlPlane, DataPlane, DeviceExecutor, Observer
from mpistrat.core.interruption import Interruption
from mpistrat.core.request import ReduceOp, ScaledOp, Sum, allreduce_request, barrier_request, specs_of
from mpistrat.core.settings import Settings
from mpistrat.core.topology import Topology
from mpistrat.engine.controller import Controller
from mpistrat.engine.engine import Engine
from mpistrat.engine.executor import Executor

from .thread_group import ThreadGroup

LONG_S = 30.0  # only a failing test waits for so long
votes = True  # whether ranks that are threads can vote


def make_engine(rank: int, size: int, control: ControlPlane, data: DataPlane, settings: Settings | None = None,
                clock: Callable[[], float] = time.monotonic,
                agreement: AgreementRound | None = None, device: DeviceExecutor | None = None,
                members: tuple[int, ...] = (), interruption: Interruption | None = None) -> Engine:
    """The engine of one of `size` ranks that are all on one host. `members` are their ranks in the job."""
    settings, topology = settings or Settings(), Topology(rank, ("",) * size, members)
    executor = Executor(data, topology, settings.fusion_bytes, device or DeviceExecutor(), Observer())
    return Engine(Controller(topology, control, executor, settings, agreement, clock, interruption))


def ballot_of(group: ThreadGroup, rank: int) -> AgreementRound | None:
    """How a rank votes, if it can."""
    return group.agreement(rank) if votes and group.size > 1 else None


def submit(engine: Engine, name: str, *arrays: np.ndarray, op: ReduceOp = Sum, prescale: float = 1.0,
           postscale: float = 1.0) -> Handle:
    return engine.submit(allreduce_request(name, specs_of(arrays), ScaledOp(op, prescale, postscale)), arrays)


def submit_barrier(engine: Engine, name: str) -> Handle:
    """Submit a barrier, which needs no collective on data."""
    return engine.submit(barrier_request(name), [])


class ByHand:
    """Engines without threads. Work that moves no data can be driven in one thread, whatever the number of ranks."""

    def __init__(self, size: int, settings: Settings | None = None):
        group = ThreadGroup(size, timeout_s=0.01)
        self.now = 0.0
        self.engines = [make_engine(rank, size, group.control(rank), group.data(rank), settings,
                                    clock=lambda: self.now, agreement=ballot_of(group, rank)) for rank in range(size)]
        self.controllers = [engine.controller for engine in self.engines]

    def settle(self, *times: float) -> None:
        """At each of these times, or now, step all engines until nothing happens any more."""
        for now in times or (self.now,):
            self.now = now
            while sum(controller.run_cycle() for controller in reversed(self.controllers)):
                pass


@contextlib.contextmanager
def running(size: int, settings: Settings | None = None, planes: Sequence[DataPlane] | None = None,
            group: ThreadGroup | None = None, start: bool = True) -> Iterator[list[Engine]]:
    """Engines of that many ranks, each with its thread, which end together."""
    group = group or ThreadGroup(size, timeout_s=LONG_S)
    engines = [make_engine(rank, size, group.control(rank), planes[rank] if planes else group.data(rank),
                           settings, agreement=ballot_of(group, rank)) for rank in range(size)]
    if start:
        for engine in engines:
            engine.start()
    try:
        yield engines
    finally:
        end_all(engines)


def end_all(engines: Sequence[Engine]) -> None:
    """End engines as their ranks would, all at the same time."""
    threads = [threading.Thread(target=engine.end, daemon=True) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert not any(thread.is_alive() for thread in threads), "an engine does not end"


def on_all(engines: Sequence[Engine], work: Callable[[int, Engine], Any]) -> list[Any]:
    """What `work(rank, engine)` returns on every rank, each in a thread of its own, by rank."""
    with ThreadPoolExecutor(len(engines)) as ranks:
        return list(ranks.map(work, range(len(engines)), engines))


def run(engine: Engine, name: str, *arrays: np.ndarray, limit_s: float = LONG_S) -> Handle:
    """As submit, but waits, and drives the engine if nobody else does."""
    return engine.run(allreduce_request(name, specs_of(arrays), ScaledOp(Sum)), arrays, limit_s)
