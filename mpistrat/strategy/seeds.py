"""Equal random states on all ranks: the ranks shuffle the data in the same order, and then each takes its part."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import tensorflow as tf
from tensorflow.python.eager.context import context, global_seed

from ..api import array_ops, runtime
from ..tensorflow.bridge import names

_VERSION = random.getstate()[0]  # The version of the state of Python's `random`, the same on all ranks


def seed_alike() -> None:
    """Seed TensorFlow with the seed that rank 0 has set, or a random one. Collective."""
    seed = global_seed()
    if seed is None:
        seed = _drawn()
    tf.random.set_seed(int(array_ops.broadcast(np.int64(seed), 0, name=names.eager("strategy/seed"))))


@contextmanager
def state_of_first_rank() -> Iterator[None]:
    """A context in which all ranks shuffle with the random state of rank 0. Collective.

    TensorFlow's random state is restored afterwards. The state of Python's `random` stays rank 0's, because Keras
    shuffles a PyDataset from it later, in another thread.
    """
    own = _state()
    if own[0] is None:
        tf.random.set_seed(_drawn())
    state = array_ops.broadcast(_as_array(_state()), 0, names.eager("strategy/random"))
    seed, numbers, python = _from_array(state)
    _set(seed, numbers)
    random.setstate(python)
    try:
        yield
    finally:
        if runtime.current().topology.rank != 0:  # Rank 0 keeps its new state, as a single process would.
            _set(own[0], own[1])


def _drawn() -> int:
    return int.from_bytes(os.urandom(4), "little") % 2**31


def _state() -> tuple[int | None, tuple, tuple]:
    """The global seed, the state of TensorFlow's generator of operation seeds, and the state of `random`."""
    return global_seed(), context()._rng.getstate(), random.getstate()


def _as_array(state: tuple[int | None, tuple, tuple]) -> np.ndarray:
    """Return a state as 64-bit numbers: the seed, then each generator's words and next normal number (or NaN)."""
    seed, *generators = state
    parts = [np.array([seed], np.int64)]
    for _, words, normal in generators:
        parts += [np.array(words, np.int64), np.array([np.nan if normal is None else normal]).view(np.int64)]
    return np.concatenate(parts)


def _from_array(array: np.ndarray) -> tuple[int, tuple, tuple]:
    def generator(part: np.ndarray) -> tuple:
        normal = float(part[-1:].view(np.float64)[0])
        return _VERSION, tuple(part[:-1].tolist()), None if np.isnan(normal) else normal

    first, second = np.split(array[1:], 2)
    return int(array[0]), generator(first), generator(second)


def _set(seed: int | None, numbers: tuple) -> None:
    tf.random.set_seed(seed)
    context()._rng.setstate(numbers)  # _rng exists, since a global seed has been set.
