"""Gradients that hosts send each other as 8-bit numbers: trainings on one host and on made-up ones, in all ways."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import keras
import numpy as np
import pytest
import tensorflow as tf
from mpi4py.MPI import COMM_WORLD

import mpistrat
import mpistrat.tensorflow as hvd
from mpistrat.tensorflow import compression

from ..support import tensorflow_stand_in
from ..support.legs import DEFAULT, HOST_EACH, MPI, TWO_HOSTS, Leg, under
from ..support.levels import sample

WAYS = ("fit", "tape", "strategy fit", "strategy loop")
WIDTH, BATCH, STEPS = 120, 4, 8
pytestmark = pytest.mark.usefixtures("initialised_afterwards")


def trained(way: str, compression: str, is_compiled: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """The weights and slots after a training of kernels of 57 KB, alike on all ranks, and how far weights moved."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    given, jit = {"compression": getattr(hvd.Compression, compression)}, is_compiled or None
    strategy = hvd.MPIStrategy(random_per_rank=False, **given) if way.startswith("strategy") else None
    with strategy.scope() if strategy else nullcontext():
        model = keras.Sequential([keras.Input((WIDTH,)), *(keras.layers.Dense(WIDTH, "relu") for _ in range(2)),
                                  keras.layers.Dense(16)])
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        if way == "fit":
            optimizer = hvd.DistributedOptimizer(optimizer, **given)
        optimizer.build(model.trainable_variables)
        model.compile(optimizer, "mse", jit_compile=bool(jit))
    rows = np.random.default_rng(1).normal(size=(STEPS * BATCH * hvd.size(), WIDTH)).astype(np.float32)
    if way != "strategy fit":  # which gets the rows of all ranks
        rows = rows.reshape(STEPS, hvd.size(), BATCH, WIDTH)[:, hvd.rank()].reshape(-1, WIDTH)
    batch = len(rows) // STEPS if way == "strategy fit" else BATCH
    before = [*map(np.array, model.get_weights())]

    def apply(x: tf.Tensor) -> None:
        with hvd.DistributedGradientTape(tf.GradientTape(), **given) if strategy is None else tf.GradientTape() as tape:
            loss = model.compute_loss(y=x[:, :16], y_pred=model(x, training=True))
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))

    if way.endswith("fit"):
        model.fit(rows, rows[:, :16], batch_size=batch, shuffle=False, verbose=0)
    else:
        step = tf.function(lambda x: strategy.run(apply, (x,)) if strategy else apply(x), jit_compile=jit)
        for start in range(0, STEPS * BATCH, BATCH):
            step(tf.constant(rows[start:start + BATCH]))
    shared = np.concatenate([np.array(v).reshape(-1) for v in (*model.weights, *optimizer.variables)])
    assert len(set(mpistrat.allgather_object(shared.tobytes()))) == 1
    return shared, np.concatenate([(a - b).reshape(-1) for a, b in zip(model.get_weights(), before, strict=True)])


@pytest.mark.parametrize("way, is_compiled", [
    ("fit", False), ("strategy fit", False), *(pytest.param(*repeated, marks=pytest.mark.nightly) for repeated in (
        ("tape", False), ("strategy loop", False), ("fit", True)))])
def test_a_training_between_hosts_is_near_and_on_one_host_the_same(way: str, is_compiled: bool, size: int) -> None:
    for leg in (DEFAULT, MPI):
        with under(leg):
            plain, moved = trained(way, "none", is_compiled)
            same, _ = trained(way, "int8", is_compiled)
            assert same.tobytes() == plain.tobytes()
    for leg in (TWO_HOSTS,) if size > 2 else (HOST_EACH,):
        with under(leg):
            _, near = trained(way, "int8", is_compiled)
            off = np.linalg.norm(near - moved) / np.linalg.norm(moved)
            assert 1e-5 < off < 0.05, (leg, off)


def test_on_one_host_it_is_said_once_that_nothing_changes(rank: int, monkeypatch: pytest.MonkeyPatch,
                                                         caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(compression, "_told", [])
    for _ in range(2):
        hvd.allreduce(tf.ones(5000), compression=hvd.Compression.int8)
    texts = [each.getMessage() for each in caplog.records if "Compression.int8 has no effect" in each.getMessage()]
    assert len(texts) == (rank == 0)
    with pytest.raises(AttributeError, match=r"Use one of Compression\.none, fp16, bf16, int8"):
        getattr(hvd.Compression, "int4")  # noqa: B009 - a user's slip, which mypy sees otherwise


def test_what_is_not_a_sum_of_floats_is_sent_as_it_is(size: int, monkeypatch: pytest.MonkeyPatch,
                                                      caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(compression, "_told", [])
    with under(TWO_HOSTS if size > 2 else HOST_EACH):
        values = np.linspace(-1, 1, 10_000, dtype=np.float32) * (mpistrat.rank() + 1)

        def both(tensor: tf.Tensor, **arguments: object) -> tuple[tf.Tensor, tf.Tensor]:
            return tuple(hvd.allreduce(tensor, compression=each, **arguments)
                         for each in (hvd.Compression.none, hvd.Compression.int8))

        for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
            np.testing.assert_array_equal(*both(tf.constant(values), op=op))
        np.testing.assert_array_equal(*both(tf.range(10_000), op=hvd.Sum))
        np.testing.assert_array_equal(*both(tf.constant(values[:4000]), op=hvd.Sum))  # less than 16 KiB
        scattered = [hvd.reducescatter(tf.constant(values), compression=each)
                     for each in (hvd.Compression.none, hvd.Compression.int8)]
        np.testing.assert_array_equal(*scattered)
        assert ("this is a reduce-scatter (Compression.bf16 " in caplog.text) == (mpistrat.rank() == 0)
        slices = tf.IndexedSlices(tf.constant(values.reshape(10, -1)), tf.range(10), dense_shape=(20, 1000))
        plain, sent = both(slices)
        np.testing.assert_array_equal(plain.values, sent.values)
        plain, sent = both(tf.constant(values), op=hvd.Average, prescale_factor=2.0, postscale_factor=3.0)
        assert 0 < np.abs(plain - sent).max() < 0.02 * np.abs(plain).max()


@sample("passes", [1, 2])
def test_ranks_of_a_set_between_hosts_accumulate(passes: int, rank: int, size: int) -> None:
    """The first rank and the last, on two hosts; the others train by themselves."""
    def trained_in(process_set: hvd.ProcessSet, compression: type) -> np.ndarray:
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), compression=compression,
                                             process_set=process_set, backward_passes_per_step=passes)
        variable = keras.Variable(np.ones(10_000, np.float32), name="kernel")
        for step in range(8):
            optimizer.apply([tf.linspace(0.1, 1.0 + rank + step, 10_000)], [variable])
        return np.array(variable)

    with under(TWO_HOSTS if size > 2 else HOST_EACH):
        of_set = hvd.add_process_set([0, size - 1]) if size > 2 else mpistrat.global_process_set
        if of_set.included():
            plain, sent = (trained_in(of_set, each) for each in (hvd.Compression.none, hvd.Compression.int8))
            off = np.linalg.norm(sent - plain) / np.linalg.norm(plain - 1)
            assert 1e-5 < off < 0.01, off
            assert all(np.array_equal(sent, other) for other in mpistrat.allgather_object(sent, process_set=of_set))


def test_a_rank_without_the_compression_of_the_others_is_named(rank: int, size: int) -> None:
    compression = hvd.Compression.none if rank == size - 1 else hvd.Compression.int8
    with under(DEFAULT), pytest.raises(mpistrat.MismatchError, match=r"compression: int8 on rank.*; none on rank"):
        hvd.allreduce(tf.ones(10), compression=compression)


def test_a_rank_that_has_joined_takes_part(rank: int, size: int) -> None:
    with under(TWO_HOSTS if size > 2 else HOST_EACH):
        values = np.linspace(-1, 1, 10_000, dtype=np.float32)
        if rank:
            result = hvd.allreduce(tf.constant(values), compression=hvd.Compression.int8, op=hvd.Sum)
            np.testing.assert_allclose(result, values * (size - 1), atol=0.02 * size)
        assert mpistrat.join() >= 0


def test_tensors_with_other_labels_have_other_errors(size: int) -> None:
    with under(TWO_HOSTS if size > 2 else HOST_EACH):
        models = [tf.Variable(tf.ones([100, 100]) * 10.0**power, name=f"model{power}") for power in (6, 0)]
        for _ in range(3):
            for variable, most in zip(models, (1e6, 1.0), strict=True):
                with hvd.DistributedGradientTape(tf.GradientTape(), compression=hvd.Compression.int8) as tape:
                    loss = tf.reduce_sum(variable * tf.reshape(tf.linspace(0.1 * most, most, 10_000), [100, 100]))
                gradient = tape.gradient(loss, variable)
                np.testing.assert_allclose(tf.reshape(gradient, [-1]), np.linspace(0.1 * most, most, 10_000),
                                           atol=2 * most / 127)


def test_what_is_rounded_off_goes_on_in_another_job(size: int) -> None:
    values = np.full([100, 100], 0.001, np.float32)  # a quarter of a quantum
    values[:, ::25] = 1.0
    variable = tf.Variable(tf.ones([100, 100]), name="kernel")

    def total_of(steps: int) -> np.ndarray:
        total = np.zeros([100, 100])
        for _ in range(steps):
            with hvd.DistributedGradientTape(tf.GradientTape(), compression=hvd.Compression.int8, op=hvd.Sum) as tape:
                loss = tf.reduce_sum(variable * values)
            total += tape.gradient(loss, variable).numpy()
        return total

    before, after = (TWO_HOSTS, HOST_EACH) if size > 2 else (HOST_EACH, HOST_EACH)
    with under(before):
        total = total_of(3)
        errors = hvd.Compression.error_feedback()
        assert len({*mpistrat.allgather_object(errors["tape[0]"].tobytes())}) == 1 and [*errors] == ["tape[0]"]
        np.testing.assert_allclose(errors["tape[0]"].reshape(100, 100), 3 * size * values - total, atol=1e-5)
        assert np.abs(errors["tape[0]"]).max() > 0.001
    with under(after):
        hvd.Compression.restore_error_feedback(errors)
        total += total_of(2)
        rest = hvd.Compression.error_feedback()["tape[0]"].reshape(100, 100)
        np.testing.assert_allclose(rest, 5 * size * values - total, atol=1e-5)
    with under(DEFAULT):
        hvd.Compression.restore_error_feedback(errors)
        np.testing.assert_array_equal(total_of(1), np.float32(size) * values)
        assert [*hvd.Compression.error_feedback()] == (["tape[0]"] if size > 1 else [])  # for hosts that come


def test_a_rank_without_memory_for_the_errors_tells_all(rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpistrat.core import quantised

    def no_memory(*_: object) -> np.ndarray:
        raise MemoryError

    with under(TWO_HOSTS if size > 2 else HOST_EACH):
        if rank == size - 1:
            monkeypatch.setattr(quantised.np, "zeros", no_memory)
        variable = tf.Variable(tf.ones([10_000]))
        with hvd.DistributedGradientTape(tf.GradientTape(), compression=hvd.Compression.int8) as tape:
            loss = tf.reduce_sum(variable)
        with pytest.raises(mpistrat.EngineError, match=r"no memory for the error feedback.*40000 bytes\. Use "
                                                       r"Compression\.bf16"):
            tape.gradient(loss, variable)
        monkeypatch.undo()


# -- tensors on GPUs, on a stand-in, beside the path for CPU tensors ---------------------------------------------------


HOSTS = {1: [], 2: ["AB"], 3: ["ABC", "ABA"]}
SHAPES = [[100, 100], [7], [301, 33]]


@contextmanager
def on_hosts(hosts: str, is_gpu: bool) -> Iterator[None]:
    """Have ranks on these hosts, and tensors on a stand-in for their GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        if is_gpu:
            tensorflow_stand_in.install(COMM_WORLD.Get_rank(), patch.setattr)
        with under(Leg(hosts, hosts=hosts)):
            yield


def gradients(steps: range, dtype: str = "float32") -> list[np.ndarray]:
    variables, results = [tf.Variable(tf.ones(shape, dtype)) for shape in SHAPES], []
    for step in steps:
        random = np.random.default_rng([mpistrat.rank(), step])
        factors = [tf.constant(random.standard_normal(shape), dtype) for shape in SHAPES]
        with hvd.DistributedGradientTape(tf.GradientTape(), compression=hvd.Compression.int8) as tape:
            loss = tf.add_n([tf.reduce_sum(variable * factor) for variable, factor in zip(variables, factors)])
        results.append(np.concatenate([np.reshape(each, -1) for each in tape.gradient(loss, variables)]))
    return results


def same(results: list[np.ndarray], expected: list[np.ndarray]) -> None:
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


def test_a_rank_that_has_joined_takes_part_on_gpus(rank: int, size: int) -> None:
    for hosts in HOSTS[size]:
        with on_hosts(hosts, is_gpu=True):
            values = tf.cast(tf.linspace(-1.0, 1.0, 10_000), tf.float32)
            hvd.allreduce(values)
            for _ in range(2 if rank else 0):
                result = hvd.allreduce(values, compression=hvd.Compression.int8, op=hvd.Sum, name="joined")
                np.testing.assert_allclose(result, np.linspace(-1, 1, 10_000) * (size - 1), atol=0.02 * size)
            assert mpistrat.join() >= 0
