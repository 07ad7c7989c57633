"""Ranks that are threads of one process."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def on_all(count: int, work: Callable[[int], Any]) -> list[Any]:
    """`work(index)` in a thread for each rank, and what they return."""
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(work, range(count)))
