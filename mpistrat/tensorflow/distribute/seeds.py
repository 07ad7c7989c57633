"""Random numbers that are the same on all ranks, so that all shuffle alike before each takes its share."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from ...api import ops as array_ops
from ...api import runtime
from .._private import context, global_seed
from .threads import wire_name


def seed_alike() -> None:
    """Seed TensorFlow with the seed that rank 0 has set, or a random one. Collective."""
    seed = global_seed()
    if seed is None:
        seed = _drawn()
    tf.random.set_seed(int(array_ops.broadcast(np.int64(seed), 0, name=wire_name("seed"))))


@contextmanager
def state_of_first_rank() -> Iterator[None]:
    """Within it, what is shuffled is shuffled as on rank 0. Collective.

    TensorFlow's state is given back afterwards; that of Python's `random`, from which Keras shuffles a PyDataset in a
    thread of its own later, stays rank 0's.
    """
    own = _state()
    if own[0] is None:
        tf.random.set_seed(_drawn())
    seed, numbers, python = array_ops.broadcast_object(_state(), 0, wire_name("random"))
    _set(seed, numbers)
    random.setstate(python)
    try:
        yield
    finally:
        if runtime.current().topology.rank != 0:  # rank 0 has gone on, as one process would have
            _set(own[0], own[1])


def _drawn() -> int:
    return int.from_bytes(os.urandom(4), "little") % 2**31


def _state() -> tuple[int | None, Any, Any]:
    """The seed, the state of what TensorFlow draws the seeds of its operations from, and that of `random`."""
    return global_seed(), context()._rng.getstate(), random.getstate()


def _set(seed: int | None, numbers: Any) -> None:
    tf.random.set_seed(seed)
    context()._rng.setstate(numbers)
