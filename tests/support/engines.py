"""Engines for tests, wired as `init` wires them."""

import time
from collections.abc import Callable

from mpistrat.core.interfaces import AgreementRound, ControlPlane, DataPlane, DeviceExecutor, Observer
from mpistrat.core.interruption import Interruption
from mpistrat.core.settings import Settings
from mpistrat.core.topology import Topology
from mpistrat.engine.controller import Controller
from mpistrat.engine.engine import Engine
from mpistrat.engine.executor import Executor


def make_engine(rank: int, size: int, control: ControlPlane, data: DataPlane, settings: Settings | None = None,
                clock: Callable[[], float] = time.monotonic,
                agreement: AgreementRound | None = None, device: DeviceExecutor | None = None,
                members: tuple[int, ...] = (), interruption: Interruption | None = None) -> Engine:
    """The engine of one of `size` ranks that are all on one host. `members` are their ranks in the job."""
    settings, topology = settings or Settings(), Topology(rank, ("",) * size, members)
    executor = Executor(data, topology, settings.fusion_bytes, device or DeviceExecutor(), Observer())
    return Engine(Controller(topology, control, executor, settings, agreement, clock, interruption))
