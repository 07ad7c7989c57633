"""Signal handlers of the script call collectives and shutdown() in the middle of collectives, as preemption does."""

import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import pytest

import mpistrat

SIGNALS = 40
SEEN_S = 0.15  # The engine looks for handlers every 0.1 s, and a collective that has begun before that may not have.
FIRST_S = 0.01


class _LeftError(Exception):
    """A handler has left the loop."""


@pytest.fixture
def on_alarm() -> Iterator[Callable[[Callable[[], object]], None]]:
    before = signal.getsignal(signal.SIGALRM)
    yield lambda handler: signal.signal(signal.SIGALRM, lambda *_: handler()) and None
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", ["eager", "async"])
def test_a_handler_may_call_a_collective(kind: str, rank: int, size: int, on_alarm: Callable) -> None:
    seen: list[float] = []

    def handler() -> None:
        seen.append(mpistrat.allreduce(float(rank), op=mpistrat.Sum, name="in the handler"))
        if len(seen) < SIGNALS:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-4, 4e-3))

    on_alarm(handler)
    time.sleep(SEEN_S)
    signal.setitimer(signal.ITIMER_REAL, FIRST_S)
    x = np.ones(1000)
    while True:
        total = mpistrat.allreduce_async(x, op=mpistrat.Sum, name="x").wait() if kind == "async" else \
            mpistrat.allreduce(x, op=mpistrat.Sum, name="x")
        assert total[0] == size
        if mpistrat.allreduce(len(seen) == SIGNALS, op=mpistrat.Min, name="end"):
            break
    assert seen == [sum(range(size))] * SIGNALS


def test_a_handler_may_call_shutdown(rank: int, size: int, on_alarm: Callable) -> None:
    def handler() -> None:
        mpistrat.shutdown()
        mpistrat.shutdown()
        raise _LeftError

    on_alarm(handler)
    time.sleep(SEEN_S)
    signal.setitimer(signal.ITIMER_REAL, FIRST_S + 0.002 * rank)
    with pytest.raises(_LeftError):
        with suppress(mpistrat.ShutdownError):  # The other rank may be in its handler before this one.
            while True:
                mpistrat.allreduce(np.ones(2**20), name="x")
        time.sleep(60)
    mpistrat.init()
    assert mpistrat.allreduce(1.0, op=mpistrat.Sum) == size
