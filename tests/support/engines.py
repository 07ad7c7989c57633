"""Engines for tests, wired as `init` wires them."""

import time
from collections.abc import Callable

from mpistrat.core.interfaces import AgreementRound, ControlPlane, DataPlane, DeviceExecutor
from mpistrat.core.settings import Settings
from mpistrat.core.topology import Topology
from mpistrat.engine.controller import Controller
from mpistrat.engine.engine import Engine
from mpistrat.engine.executor import Executor
from mpistrat.engine.parked import ThreadScan


def make_engine(rank: int, size: int, control: ControlPlane, data: DataPlane, settings: Settings | None = None,
                clock: Callable[[], float] = time.monotonic,
                agreement: AgreementRound | None = None, device: DeviceExecutor | None = None,
                scan: ThreadScan | None = None) -> Engine:
    """The engine of one of `size` ranks that are all on one host."""
    settings = settings or Settings()
    executor = Executor(data, rank, size, settings.fusion_bytes, device or DeviceExecutor())
    return Engine(Controller(Topology(rank, ("",) * size), control, executor, settings, agreement, clock, scan))
