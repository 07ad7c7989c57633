"""What the programs of all features share: where they run, how they are listed, and values per replica."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

import mpistrat


@dataclass(frozen=True)
class World:
    strategy: tf.distribute.Strategy  # With one or more replicas in each process.
    rank: int  # This process, from 0.
    directory: str  # That all processes see, empty at first.

    @property
    def replicas(self) -> int:
        return self.strategy.num_replicas_in_sync


Program = Callable[[World], None]


@dataclass(frozen=True)
class Feature:
    """A program that raises an error unless what its title says works."""

    group: str  # The heading that it stands under.
    title: str  # What it shows, for a table.
    program: Program  # Every process of the strategy runs it.

    @property
    def name(self) -> str:
        return self.program.__name__


FEATURES: dict[str, Feature] = {}


def feature(group: str, title: str) -> Callable[[Program], Program]:
    def register(program: Program) -> Program:
        assert program.__name__ not in FEATURES, program.__name__
        FEATURES[program.__name__] = Feature(group, title, program)
        return program
    return register


def per_replica(world: World, function: Callable[[int], Any]) -> Any:
    """A distributed value: `function(i)` on replica i."""
    return world.strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(function(context.replica_id_in_sync_group)))


def local_values(world: World, value: Any) -> list[np.ndarray]:
    return [np.asarray(v) for v in world.strategy.experimental_local_results(value)]


def of_all_processes(value: Any) -> list[Any]:
    """The `value` of each process, on all of them. Collective."""
    return mpistrat.allgather_object(value)


def assert_equal_on_all(arrays: Sequence[Any]) -> None:
    """Every process has the same bits. Collective."""
    everybody = of_all_processes([np.asarray(array).tobytes() for array in arrays])
    assert all(other == everybody[0] for other in everybody), "not the same bits in all processes"


def assert_close(values: Sequence[Any], expected: Sequence[Any], atol: float = 1e-5, rtol: float = 0.0) -> None:
    for value, other in zip(values, expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=rtol, atol=atol)


def in_replica() -> tf.distribute.ReplicaContext:
    return tf.distribute.get_replica_context()


def points(rows: int, columns: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """The same rows in every process: normal inputs and a smooth function of them."""
    generator = np.random.default_rng(11)
    x = generator.standard_normal((rows, columns)).astype(np.float32)
    return x, np.tanh(x @ generator.standard_normal((columns, 1))).astype(np.float32)
