"""8-bit numbers between made-up hosts for tensors on GPUs, on a stand-in, beside the path for CPU tensors."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat

tf = pytest.importorskip("tensorflow")

import mpistrat.tensorflow as hvd  # noqa: E402

from ..support import tensorflow_stand_in  # noqa: E402
from ..support.legs import Leg, under  # noqa: E402

HOSTS = {1: [], 2: ["AB"], 3: ["ABC", "ABA"]}
SHAPES = [[100, 100], [7], [301, 33]]


@pytest.fixture(autouse=True)
def _initialised_afterwards() -> Iterator[None]:
    yield
    mpistrat.init()


@contextmanager
def on_hosts(hosts: str, is_gpu: bool) -> Iterator[None]:
    """Have ranks on these hosts, and tensors on a stand-in for their GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        if is_gpu:
            tensorflow_stand_in.install(MPI.COMM_WORLD.Get_rank(), patch.setattr)
        with under(Leg(hosts, hosts=hosts)):
            yield


def gradients(steps: range, dtype: str = "float32") -> list[np.ndarray]:
    """What a tape gives in each step, all tensors after each other."""
    variables, results = [tf.Variable(tf.ones(shape, dtype)) for shape in SHAPES], []
    for step in steps:
        random = np.random.default_rng([mpistrat.rank(), step])
        factors = [tf.constant(random.standard_normal(shape), dtype) for shape in SHAPES]
        with hvd.DistributedGradientTape(tf.GradientTape(), compression=hvd.Compression.int8) as tape:
            loss = tf.add_n([tf.reduce_sum(variable * factor) for variable, factor in zip(variables, factors)])
        results.append(np.concatenate([np.reshape(each, -1) for each in tape.gradient(loss, variables)]))
    return results


def same(results: list[np.ndarray], expected: list[np.ndarray]) -> None:
    """Whether these have the same bits, on all ranks."""
    assert [each.tobytes() for each in results] == [each.tobytes() for each in expected]
    everywhere = mpistrat.allgather_object([each.tobytes() for each in results])
    assert all(other == everywhere[0] for other in everywhere)


def test_gpus_have_the_bits_of_cpu_tensors_and_go_on_with_their_errors(size: int) -> None:
    for hosts in HOSTS[size]:
        found = []
        for is_gpu in (False, True):
            with on_hosts(hosts, is_gpu):
                results = gradients(range(2))
                errors = hvd.Compression.error_feedback()
                assert np.abs(errors["tape[0]"]).max() > 1e-4
                results += [*errors.values(), *gradients(range(2, 4))]
            with on_hosts(hosts, is_gpu):
                hvd.Compression.restore_error_feedback(errors)
                found.append([*results, *gradients(range(2, 4))])
                same(found[-1], found[0])


def test_a_rank_that_has_joined_takes_part(rank: int, size: int) -> None:
    for hosts in HOSTS[size]:
        with on_hosts(hosts, is_gpu=True):
            values = tf.cast(tf.linspace(-1.0, 1.0, 10_000), tf.float32)
            hvd.allreduce(values)
            for _ in range(2 if rank else 0):
                result = hvd.allreduce(values, compression=hvd.Compression.int8, op=hvd.Sum, name="joined")
                np.testing.assert_allclose(result, np.linspace(-1, 1, 10_000) * (size - 1), atol=0.02 * size)
            assert mpistrat.join() >= 0
