"""Targets: the Python objects that nodes of a graph call. A node has the number of its target."""

import itertools
import secrets
import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Targets(weakref.WeakValueDictionary[int, T]):
    """The targets of one kind of node, by their numbers. A target lives as long as something else refers to it.

    Args:
        bits: The number of bits of the first number, which is random: a graph that another process has saved must not
            find a target here.
        register: Registers the code that calls targets. Called once in a process, before the first target is added.
    """

    def __init__(self, bits: int, register: Callable[[], None]):
        super().__init__()
        self._numbers = itertools.count(secrets.randbits(bits))
        self._lock, self._register, self._is_registered = threading.Lock(), register, False

    def prepare(self) -> None:
        """Call `register`, unless it has been called before. Any thread may call prepare()."""
        with self._lock:
            if not self._is_registered:
                self._register()
                self._is_registered = True

    def add(self, target: T) -> int:
        """Add a target; return its number. Any thread may call it."""
        self.prepare()
        number = next(self._numbers)
        self[number] = target
        return number
