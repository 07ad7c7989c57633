"""DistributedOptimizer on every rank: what it does to gradients, and how it gets on with the rest of Keras."""

import copy
import json
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mpistrat
import mpistrat.keras as hvd
from mpistrat.core.handle import Entry
from mpistrat.keras.bridge.private_names import distributed_in

from ..support.keras_versions import needs_multi_optimizer
from ..support.levels import sample
from .helpers import assert_close, assert_equal_on_all_ranks, both_ways, eagerly, either_way, in_graph, loaded_again

SHAPES = [(3, 2), (4,), (2, 1)]


def new_variables() -> list[Any]:
    generator = np.random.default_rng(7)
    return [keras.Variable(generator.standard_normal(shape).astype(np.float32), name=f"weight{i}")
            for i, shape in enumerate(SHAPES)]


def gradients_of(rank: int, step: int) -> list[np.ndarray]:
    """Gradients of a length of about ten, which differ much among the ranks."""
    generator = np.random.default_rng((rank, step))
    return [generator.normal(0.3, 4.0, shape).astype(np.float32) for shape in SHAPES]


def mean_gradients(size: int, step: int) -> list[np.ndarray]:
    return [np.mean(np.array(parts, np.float64), axis=0).astype(np.float32)
            for parts in zip(*(gradients_of(r, step) for r in range(size)))]


def steps_with(optimizer: Any, gradients: Sequence[Sequence[np.ndarray]], way: Callable = eagerly) -> list[np.ndarray]:
    """Apply a list of gradients for each step to new variables, and return what they are then."""
    variables = new_variables()
    optimizer.build(variables)
    step = way(lambda *values: optimizer.apply(values, variables))
    for values in gradients:
        step(*[tf.constant(value) for value in values])
    return [variable.numpy() for variable in variables]


def assert_like_one_process(make: Callable, rank: int, size: int, way: Callable = eagerly, steps: int = 4,
                            **arguments: Any) -> None:
    """The distributed optimizer does with the ranks' gradients what the plain one does with their average."""
    got = steps_with(hvd.DistributedOptimizer(make(), **arguments), [gradients_of(rank, s) for s in range(steps)], way)
    expected = steps_with(make(), [mean_gradients(size, s) for s in range(steps)])
    for value, reference, start in zip(got, expected, new_variables()):
        np.testing.assert_allclose(value, reference, rtol=1e-5, atol=1e-6)
        assert not np.array_equal(value, start.numpy())
    assert_equal_on_all_ranks(got)


# -- what becomes of gradients ----------------------------------------------------------------------------------------


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.1),
    "amsgrad": lambda: keras.optimizers.Adam(0.1, amsgrad=True),
    "adamw": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.1),
    "weight decay": lambda: keras.optimizers.SGD(0.1, weight_decay=0.2),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.1, centered=True),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.5),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.5),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=0.3),
    "ema": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)),
    "gradient accumulation": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "accumulation and clipping": lambda: keras.optimizers.Adam(0.1, gradient_accumulation_steps=2, global_clipnorm=0.5),
}


@pytest.mark.horovod("optimizer")
@sample("name", OPTIMIZERS)
def test_it_does_with_the_ranks_gradients_what_one_process_does_with_their_average(name: str, rank: int,
                                                                                   size: int) -> None:
    assert_like_one_process(OPTIMIZERS[name], rank, size)


@sample("name", ["momentum", "global_clipnorm", "ema", "schedule", "accumulation and clipping"])
def test_so_it_does_in_a_graph(name: str, rank: int, size: int) -> None:
    assert_like_one_process(OPTIMIZERS[name], rank, size, in_graph)


@pytest.mark.horovod("predivide")
@sample("factor", [0.5, 4.0])
def test_a_predivide_factor_does_not_change_the_average(factor: float, rank: int, size: int) -> None:
    assert_like_one_process(OPTIMIZERS["sgd"], rank, size, gradient_predivide_factor=factor)


@pytest.mark.horovod("optimizer-op")
@either_way
def test_gradients_are_summed_on_request(way: Callable, rank: int, size: int) -> None:
    got = steps_with(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum), [gradients_of(rank, 0)], way)
    for value, start, mean in zip(got, new_variables(), mean_gradients(size, 0)):
        np.testing.assert_allclose(value, start.numpy() - size * mean, rtol=1e-5, atol=1e-5)


# How the gradients and variables of a step are given.
APPLIED: dict[str, Callable[[Any, list, list], None]] = {
    "pairs": lambda optimizer, gradients, variables: optimizer.apply_gradients(zip(gradients, variables)),
    "no variables": lambda optimizer, gradients, variables: optimizer.apply(gradients),
    "iterators": lambda optimizer, gradients, variables: optimizer.apply(iter(gradients), iter(variables))}


@pytest.mark.horovod("optimizer-methods")
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("form", APPLIED)
def test_gradients_and_variables_may_be_given_in_any_form(form: str, passes: int, rank: int, size: int) -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=passes,
                                         average_aggregated_gradients=True)
    variables = new_variables()
    optimizer.build(variables)
    for _ in range(passes):
        APPLIED[form](optimizer, list(map(tf.constant, gradients_of(rank, 0))), variables)
    for variable, start, mean in zip(variables, new_variables(), mean_gradients(size, 0)):
        np.testing.assert_allclose(variable.numpy(), start.numpy() - mean, rtol=1e-5, atol=1e-6)


def test_other_numbers_of_gradients_and_variables_are_refused(rank: int) -> None:
    optimizer, variables = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)), new_variables()
    gradients = list(map(tf.constant, gradients_of(rank, 0)))
    with pytest.raises(ValueError, match="must already be built"):
        optimizer.apply(gradients)
    with pytest.raises(ValueError, match=f"got {len(gradients)} gradients for {len(variables) - 1} variables"):
        optimizer.apply(gradients, variables[1:])
    optimizer.build(variables)
    with pytest.raises(ValueError, match=f"Received a list of {len(gradients) - 1} gradients"):
        optimizer.apply(gradients[1:])


@both_ways
def test_gradients_may_be_applied_twice_in_a_step(way: Callable, rank: int, size: int) -> None:
    """Of more bytes than what a submit waits for, so that the first is under way when the second begins."""
    optimizer, variable = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)), keras.Variable(np.zeros((600, 600)))
    optimizer.build([variable])

    def step() -> None:
        gradients = [tf.fill([600, 600], factor * (rank + 1.0)) for factor in (1.0, 10.0)]
        for gradient in gradients:
            optimizer.apply([gradient], [variable])

    step = way(step)
    for number in range(1, 4):
        step()
        np.testing.assert_array_equal(variable.numpy(), np.full((600, 600), -11 * number * (size + 1) / 2))


@pytest.mark.horovod("none")
@either_way
def test_a_gradient_that_is_none_is_left_out(way: Callable, rank: int, size: int) -> None:
    optimizer, variables = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)), new_variables()
    optimizer.build(variables)
    values = gradients_of(rank, 0)
    with pytest.warns(UserWarning, match="Gradients do not exist for variables"):
        way(lambda: optimizer.apply([tf.constant(values[0]), None, tf.constant(values[2])], variables))()
    mean = mean_gradients(size, 0)
    for i, (variable, start) in enumerate(zip(variables, new_variables())):
        change = 0 if i == 1 else mean[i]
        np.testing.assert_allclose(variable.numpy(), start.numpy() - change, rtol=1e-5, atol=1e-6)


@pytest.mark.horovod("backward-passes-none")
def test_none_and_accumulation(rank: int, size: int) -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, gradient_accumulation_steps=2))
    variables = new_variables()
    optimizer.build(variables)
    for step in range(2):
        with pytest.warns(UserWarning, match="Gradients do not exist for variables"):
            optimizer.apply([None, tf.constant(gradients_of(rank, step)[1]), None], variables)
    mean = (mean_gradients(size, 0)[1] + mean_gradients(size, 1)[1]) / 2
    np.testing.assert_allclose(variables[1].numpy(), new_variables()[1].numpy() - mean, rtol=1e-5, atol=1e-6)
    assert np.array_equal(variables[0].numpy(), new_variables()[0].numpy())


# -- gradient accumulation --------------------------------------------------------------------------------------------


@pytest.mark.horovod("backward-passes")
@both_ways
@pytest.mark.parametrize("average", [False, True], ids=["sum", "average"])
def test_backward_passes_per_step(way: Callable, average: bool, rank: int, size: int, submitted: list[Entry]) -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2,
                                         average_aggregated_gradients=average)
    got = steps_with(optimizer, [gradients_of(rank, s) for s in range(5)], way)
    # The fifth pass waits for the sixth.
    assert len([entry for entry in submitted if entry.request.name.startswith("optimizer")]) == 2
    means = [mean_gradients(size, s) for s in range(4)]
    for value, start, *passes in zip(got, new_variables(), *means):
        np.testing.assert_allclose(value, start.numpy() - sum(passes) / (2 if average else 1), rtol=1e-5, atol=1e-5)
    assert_equal_on_all_ranks(got)


@pytest.mark.horovod("backward-passes-infinity")
@either_way
def test_an_infinite_gradient_is_gone_after_the_update(way: Callable, rank: int, size: int) -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    variables = new_variables()
    optimizer.build(variables)
    step = way(lambda *values: optimizer.apply(values, variables))
    for _ in range(2):
        step(*[tf.fill(shape, np.float32(np.inf)) for shape in SHAPES])
    for variable, start in zip(variables, new_variables()):
        assert not np.any(np.isfinite(variable.numpy()))
        variable.assign(start)
    for passed in range(2):
        step(*map(tf.constant, gradients_of(rank, passed)))
    for variable, start, *means in zip(variables, new_variables(), mean_gradients(size, 0), mean_gradients(size, 1)):
        np.testing.assert_allclose(variable.numpy(), start.numpy() - sum(means), rtol=1e-5, atol=1e-5)


class WithoutClipping(keras.optimizers.SGD):
    """As of a Keras that clips gradients by a method of another name."""

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
        accumulated = [self._accumulated_gradients[self._get_variable_index(v)] for v in trainable_variables]
        steps = self.gradient_accumulation_steps

        def update() -> None:
            self._backend_update_step([(g + a) / steps for g, a in zip(grads, accumulated)], trainable_variables,
                                      self.learning_rate)

        keras.ops.cond((self._iterations + 1) % steps == 0, update,
                       lambda: self._backend_increment_gradient_accumulators(grads, accumulated))


class ClipsBefore(keras.optimizers.SGD):
    """As of Keras before 3.5, which clips gradients before it accumulates them."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        super().apply(self._clip_gradients(list(grads)), trainable_variables)


class WithoutBackend(keras.optimizers.SGD):
    """As of a Keras that applies gradients by a method of another name."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        for gradient, variable in zip(grads, trainable_variables):
            self.update_step(gradient, variable.value, 0.1)


@either_way
@pytest.mark.parametrize(("cls", "problem"), [
    (WithoutClipping, "WithoutClipping.apply did not call _clip_gradients"),
    (WithoutBackend, "WithoutBackend.apply did not call _backend_apply_gradients"),
    (ClipsBefore, "this Keras clips gradients before it accumulates them")])
@sample("asked", ["here", "of Keras"])
def test_a_keras_that_does_not_call_what_averages_accumulated_gradients_is_refused(
        way: Callable, cls: Any, problem: str, asked: str, rank: int) -> None:
    optimizer = hvd.DistributedOptimizer(cls(0.1), backward_passes_per_step=2) if asked == "here" else \
        hvd.DistributedOptimizer(cls(0.1, gradient_accumulation_steps=2))
    with pytest.raises(mpistrat.MissingDependencyError, match=rf"with Keras {keras.__version__}: {problem}"):
        steps_with(optimizer, [gradients_of(rank, step) for step in range(2)], way)


@pytest.mark.parametrize("name", ["_backend_apply_gradients", "_clip_gradients"])
def test_a_keras_without_what_averages_accumulated_gradients_is_refused_at_once(
        name: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for base in keras.optimizers.SGD.__mro__:  # MPIStrategy's replacement stands in a subclass of the original's class.
        if name in vars(base):
            monkeypatch.delattr(base, name)
    text = rf"with Keras {keras.__version__}: SGD has no {name}\. .*Leave out backward_passes_per_step"
    with pytest.raises(mpistrat.MissingDependencyError, match=text):
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2)
    with pytest.raises(mpistrat.MissingDependencyError, match=text):
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    later = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    later.gradient_accumulation_steps = 2
    with pytest.raises(mpistrat.MissingDependencyError, match=text):
        steps_with(later, [gradients_of(rank, 0)])


def test_the_sum_of_backward_passes_is_what_is_clipped(rank: int, size: int) -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, clipvalue=1.0), backward_passes_per_step=2)
    got = steps_with(optimizer, [gradients_of(rank, s) for s in range(2)])
    for value, start, first, second in zip(got, new_variables(), mean_gradients(size, 0), mean_gradients(size, 1)):
        np.testing.assert_allclose(value, start.numpy() - np.clip(first + second, -1, 1), rtol=1e-5, atol=1e-6)


# -- variables that their gradient overwrites -------------------------------------------------------------------------


def overwritten_by(optimizer: Any, steps: Sequence[Sequence[float]], way: Callable, is_local: bool = False
                   ) -> tuple[list[float], float]:
    """Two variables after steps of these "gradients": the first is overwritten, the second has the gradient 1."""
    largest, weight = keras.Variable([0.0, 0.0], name="largest"), keras.Variable(1.0, name="weight")
    largest.overwrite_with_gradient = True
    if is_local:
        optimizer.register_local_var(largest)
    optimizer.build([largest, weight])
    step = way(lambda values: optimizer.apply([values, tf.constant(1.0)], [largest, weight]))
    for values in steps:
        step(tf.constant(values))
    return largest.numpy().tolist(), float(weight.numpy())


def third(*values: float) -> list[float]:
    """Thirds, which no sum, quotient or half precision keeps."""
    return [float(np.float32(value / 3)) for value in values]


@either_way
@pytest.mark.parametrize("arguments", [
    {}, {"op": mpistrat.Sum}, {"compression": hvd.Compression.fp16}, {"groups": 2}, {"gradient_predivide_factor": 4.0},
    {"sparse_as_dense": True}], ids=str)
def test_what_overwrites_a_variable_is_the_largest_of_all_ranks(way: Callable, arguments: dict, rank: int,
                                                                size: int) -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5), **arguments)
    largest, weight = overwritten_by(optimizer, [third(9, 9), third(1 + rank, -1 - rank)], way)
    assert largest == third(size, -1)
    assert weight == (1 - size if "op" in arguments else 0)


@either_way
@pytest.mark.parametrize("arguments", [
    {"gradient_accumulation_steps": 2}, {"backward_passes_per_step": 2},
    {"backward_passes_per_step": 2, "average_aggregated_gradients": True, "op": mpistrat.Sum},
    {"scale": True}], ids=str)
def test_it_is_the_largest_of_all_ranks_and_steps_that_are_accumulated(way: Callable, arguments: dict, rank: int,
                                                                       size: int) -> None:
    arguments, steps = dict(arguments), arguments.get("gradient_accumulation_steps")
    inner = keras.optimizers.SGD(0.5, gradient_accumulation_steps=arguments.pop("gradient_accumulation_steps", None))
    if arguments.pop("scale", False):
        inner = keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0)
    elif steps is None:
        steps = arguments["backward_passes_per_step"]
    optimizer = hvd.DistributedOptimizer(inner, **arguments)
    given = [third(1 + rank, 7), third(-1 - rank, rank), third(-size, 2)]
    assert overwritten_by(optimizer, given[:2], way)[0] == (third(size, 7) if steps else third(-1, size - 1))


def test_on_ranks_without_others_it_is_the_ranks_own(rank: int, size: int) -> None:
    process_set = hvd.add_process_set(range(size - 1))
    try:
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5), process_set=process_set)
        largest, _ = overwritten_by(optimizer, [third(1 + rank, -1 - rank)], eagerly)
        assert largest == (third(size, -size) if rank == size - 1 else third(size - 1, -1))
    finally:
        hvd.remove_process_set(process_set)


@either_way
def test_of_a_local_variable_it_is_the_ranks_own(way: Callable, rank: int) -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5))
    assert overwritten_by(optimizer, [third(1 + rank, rank)], way, is_local=True)[0] == third(1 + rank, rank)


# -- tf.IndexedSlices -------------------------------------------------------------------------------------------------


def embedding_model() -> Any:
    keras.utils.set_random_seed(3)
    return keras.Sequential([keras.Input((3,), dtype="int32"), keras.layers.Embedding(10, 4), keras.layers.Flatten(),
                             keras.layers.Dense(1)])


def embedding_batch(rank: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng((rank, step))
    return generator.integers(0, 10, (4, 3)), generator.standard_normal((4, 1)).astype(np.float32)


def train_embedding(optimizer: Any, batches: Sequence[tuple[np.ndarray, ...]], way: Callable) -> list[np.ndarray]:
    model = embedding_model()
    optimizer.build(model.trainable_variables)

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        assert isinstance(gradients[0], tf.IndexedSlices)
        optimizer.apply(gradients, model.trainable_variables)

    step = way(step)
    for x, y in batches:
        step(tf.constant(x), tf.constant(y))
    return model.get_weights()


@pytest.mark.horovod("backward-passes-slices")
@both_ways
@sample("make", [
    lambda: keras.optimizers.SGD(0.5), lambda: keras.optimizers.Adam(0.1),
    lambda: keras.optimizers.SGD(0.5, gradient_accumulation_steps=2)], ids=["sgd", "adam", "accumulation"])
def test_an_embedding_learns_as_in_one_process(way: Callable, make: Callable, rank: int, size: int) -> None:
    got = train_embedding(hvd.DistributedOptimizer(make()), [embedding_batch(rank, s) for s in range(4)], way)
    together = [tuple(map(np.concatenate, zip(*(embedding_batch(r, s) for r in range(size))))) for s in range(4)]
    assert_close(got, train_embedding(make(), together, way), rtol=1e-4)
    assert_equal_on_all_ranks(got)


# -- loss scaling -----------------------------------------------------------------------------------------------------


def loss_scaled(inside: bool) -> Any:
    """A LossScaleOptimizer with a scale of 8 around a distributed SGD, or a distributed one around SGD."""
    scaled, inner = keras.optimizers.LossScaleOptimizer, keras.optimizers.SGD(1.0)
    if inside:
        return scaled(hvd.DistributedOptimizer(inner), initial_scale=8.0)
    return hvd.DistributedOptimizer(scaled(inner, initial_scale=8.0))


where = pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])


@both_ways
@where
@sample("bad", [float("inf"), float("nan")])
def test_an_overflow_on_one_rank_skips_the_step_on_all(way: Callable, inside: bool, bad: float, rank: int,
                                                       size: int) -> None:
    optimizer, variables = loss_scaled(inside), new_variables()
    optimizer.build(variables)
    step = way(lambda *values: optimizer.apply(values, variables))
    for overflowing in range(size):
        values = gradients_of(rank, 0)
        if rank == overflowing:
            values[1][2] = bad
        step(*map(tf.constant, values))
        assert float(optimizer.dynamic_scale.numpy()) == 8.0 / 2 ** (overflowing + 1)
    assert all(np.array_equal(variable.numpy(), start.numpy()) for variable, start in zip(variables, new_variables()))
    assert int(optimizer.iterations.numpy()) == 0
    scale = float(optimizer.dynamic_scale.numpy())
    step(*[tf.constant(scale * value) for value in gradients_of(rank, 1)])
    for variable, start, mean in zip(variables, new_variables(), mean_gradients(size, 1)):
        np.testing.assert_allclose(variable.numpy(), start.numpy() - mean, rtol=1e-5, atol=1e-5)


# -- being a Keras optimizer ------------------------------------------------------------------------------------------


@pytest.mark.horovod("optimizer-class")
def test_it_is_of_a_subclass_of_the_same_name() -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.1))
    assert isinstance(optimizer, keras.optimizers.Adam)
    assert type(optimizer) is not keras.optimizers.Adam
    assert type(optimizer).__name__ == "Adam"
    assert type(optimizer) is type(hvd.DistributedOptimizer(keras.optimizers.Adam(0.2)))


def test_it_has_the_configuration_of_the_original_and_leaves_that_alone(rank: int) -> None:
    original = keras.optimizers.AdamW(0.3, weight_decay=0.1, clipnorm=2.0, use_ema=True, name="mine")
    config = original.get_config()
    optimizer = hvd.DistributedOptimizer(original)
    assert optimizer.get_config() == config == original.get_config()
    assert not original.built
    assert hvd.DistributedOptimizer(original, name="other").name == "other"
    assert optimizer.name == "mine"


class Halving(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule that Keras does not know, and that has no configuration."""

    def __call__(self, step: Any) -> Any:
        return 0.5 ** (keras.ops.cast(step, "float32") + 1.0)


class Mine(keras.optimizers.SGD):
    """An optimizer that Keras does not know."""


def not_biases(optimizer: Any) -> Any:
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


def several() -> Any:
    known = keras.optimizers.OptimizerMap(Mine(Halving()), {"kernel": not_biases(keras.optimizers.AdamW(0.1))})
    return keras.optimizers.MultiOptimizer(known)


# What a configuration of plain values does not keep.
BEYOND_CONFIGURATIONS = {
    "schedule": lambda: keras.optimizers.SGD(Halving(), momentum=0.5),
    "function": lambda: keras.optimizers.SGD(lambda *_: 0.25),  # An old Keras passes the iterations.
    "the user's class": lambda: Mine(Halving()),
    "exclusions": lambda: not_biases(keras.optimizers.AdamW(0.1, weight_decay=0.5)),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(not_biases(Mine(Halving(), weight_decay=0.5)), 4.0),
    "several": several,
    "several by a function": lambda: keras.optimizers.MultiOptimizer(_chosen),
}
_made: dict[str, Any] = {}


def _chosen(variable: Any) -> Any:
    return _made.setdefault(variable.path, Mine(Halving()))


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_multi_optimizer if "several" in name else ())
                                  for name in BEYOND_CONFIGURATIONS])
@sample("is_built", [False, True], ids=["new", "built"])
def test_it_keeps_what_a_configuration_does_not(name: str, is_built: bool, rank: int, size: int) -> None:
    def trained(distribute: bool) -> list[np.ndarray]:
        _made.clear()
        kernel, bias = keras.Variable([[2.0, 1.0]], name="kernel"), keras.Variable([3.0], name="bias")
        optimizer = BEYOND_CONFIGURATIONS[name]()
        if is_built:
            optimizer.build([kernel, bias])
        if distribute:
            optimizer = hvd.DistributedOptimizer(optimizer)
        scale = 4.0 if name == "loss scale" else 1.0
        for step in range(3):
            own = (rank + 1.0) if distribute else (size + 1) / 2
            optimizer.apply([tf.constant([[1.0, step]]) * own * scale, tf.constant([0.5]) * own * scale],
                            [kernel, bias])
        return [kernel.numpy(), bias.numpy()]

    assert_close(trained(True), trained(False), 0.0, rtol=1e-6)


def through_json(config: dict) -> dict:
    return json.loads(json.dumps(config))


# What makes a copy of an optimizer.
COPIES: dict[str, Callable[[Any], Any]] = {
    "from_config": lambda o: o.from_config(o.get_config()),
    "from_config of the original class": lambda o: keras.optimizers.SGD.from_config(o.get_config()),
    "deserialize": lambda o: keras.optimizers.deserialize(keras.optimizers.serialize(o)),
    "deepcopy": copy.deepcopy,
    "pickle": lambda o: pickle.loads(pickle.dumps(o)),
    "in a LossScaleOptimizer": lambda o: keras.optimizers.deserialize(
        keras.optimizers.serialize(keras.optimizers.LossScaleOptimizer(o, initial_scale=1.0))),
    "distributed once more": lambda o: hvd.DistributedOptimizer(
        keras.optimizers.SGD.from_config(o.get_config()), op=mpistrat.Sum),
}


@pytest.mark.parametrize("name", ["deepcopy", "pickle"])
def test_copies_have_the_iterations_where_keras_copies_them(name: str) -> None:
    plain = keras.optimizers.SGD(0.5)  # Keras copies no slots, and the iterations if there are no slots.
    plain.iterations.assign(3)
    assert int(hvd.DistributedOptimizer(plain).iterations) == 3
    assert int(COPIES[name](hvd.DistributedOptimizer(plain)).iterations) == int(COPIES[name](plain).iterations) == 3


@pytest.mark.horovod("optimizer-from-config")
@pytest.mark.parametrize("name", COPIES)
def test_copies_have_the_arguments_of_the_original(name: str, rank: int, size: int) -> None:
    unused, original = (hvd.DistributedOptimizer(keras.optimizers.SGD(0.5, momentum=0.5), op=mpistrat.Sum)
                        for _ in range(2))
    if rank == 0:  # A copy that does not train may be on one rank only.
        copy.deepcopy(unused)
    made, variable = COPIES[name](original), keras.Variable([0.0])
    assert distributed_in(made) != [original]
    assert "mpistrat" not in json.dumps(original.get_config())
    for _ in range(2):
        made.apply([tf.fill([1], rank + 1.0)], [variable])
    np.testing.assert_allclose(variable.numpy(), [-0.5 * 2.5 * size * (size + 1) / 2], rtol=1e-6)


def test_copies_accumulate_as_the_original(rank: int, size: int) -> None:
    original = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    made, variable = original.from_config(original.get_config()), keras.Variable([0.0])
    for _ in range(4):
        made.apply([tf.fill([1], rank + 1.0)], [variable])
    np.testing.assert_allclose(variable.numpy(), [-2 * (size + 1)], rtol=1e-6)  # the sums of two passes


def test_a_copy_that_cannot_average_as_the_original_is_an_error() -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.1))
    with pytest.raises(ValueError, match=r"DistributedOptimizer\(keras.optimizers.Adam.from_config\(config\)\)"):
        type(optimizer).from_config(through_json(optimizer.get_config()))
    variable = keras.Variable([1.0])
    optimizer.register_local_var(variable)
    of_a_set = hvd.DistributedOptimizer(keras.optimizers.Adam(0.1), process_set=mpistrat.ProcessSet([0]))
    for made in (type(optimizer)(0.1), optimizer.from_config(optimizer.get_config()), copy.deepcopy(optimizer),
                 copy.deepcopy(pickle.loads(pickle.dumps(optimizer))), pickle.loads(pickle.dumps(of_a_set))):
        with pytest.raises(ValueError, match=r"this Adam cannot average gradients\. .* Write hvd.Distrib"):
            made.apply([tf.ones([1])], [variable])
    hvd.DistributedOptimizer(made).apply([tf.ones([1])], [variable])
    np.testing.assert_allclose(variable.numpy(), [0.9], rtol=1e-5)


def compiled_again(model: Any) -> Any:
    other = keras.models.clone_model(model)
    other.compile_from_config(model.get_compile_config())
    return other


@sample(("make", "has_state"), [
    pytest.param(copy.deepcopy, True, id="deepcopy"),
    pytest.param(lambda m: pickle.loads(pickle.dumps(m)), True, id="pickle"),
    pytest.param(compiled_again, False, id="compile_from_config"),
    pytest.param(lambda m: compiled_again(copy.deepcopy(m)), False, id="compile_from_config of a copy"),
    pytest.param(lambda m: compiled_again(loaded_again(m)), False, id="compile_from_config of a loaded model")])
def test_copies_of_a_model_train_with_all_ranks(make: Callable, has_state: bool, rank: int) -> None:
    model = trained_model(rank, hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)))
    made = make(model)
    assert distributed_in(made.optimizer) == [made.optimizer]
    if has_state:
        assert int(made.optimizer.iterations.numpy()) == 2
        assert_close(*([v.numpy() for v in each.optimizer.variables] for each in (made, model)), atol=0)
    made.set_weights(model.get_weights())
    generator = np.random.default_rng(rank)
    for _ in range(2):
        made.train_on_batch(generator.standard_normal((4, 3)), generator.standard_normal((4, 1)))
    weights = mpistrat.allgather_object(b"".join(weight.tobytes() for weight in made.get_weights()))
    assert len(set(weights)) == 1
    assert made.get_weights()[0].tobytes() != model.get_weights()[0].tobytes()


@needs_multi_optimizer
def test_copies_of_a_model_with_several_optimizers_do_not_train() -> None:
    parts = [hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), keras.optimizers.SGD(0.1)]
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(parts[0], {"bias": parts[1]})), "mse")
    made = copy.deepcopy(model)
    assert made.predict(np.ones((2, 3)), verbose=0).shape == (2, 1)
    with pytest.raises(ValueError, match=r"this MultiOptimizer cannot average gradients"):
        made.fit(np.ones((2, 3)), np.ones((2, 1)), verbose=0)


PASSES_ELSEWHERE: dict[str, tuple[Callable[[], Any], str]] = {
    "SGD": (lambda: keras.optimizers.SGD(gradient_accumulation_steps=2), "backward_passes_per_step of DistributedOpt"),
    "loss scale": (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
                   r"does not work with LossScaleOptimizer\. Give gradient_acc"),
    "several": (several, r"does not work with MultiOptimizer\. Give gradient_acc"),
    "several by a function": (BEYOND_CONFIGURATIONS["several by a function"], "does not work with MultiOptimizer")}


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_multi_optimizer if "several" in name else ())
                                  for name in PASSES_ELSEWHERE])
def test_passes_are_counted_in_one_optimizer(name: str) -> None:
    make, text = PASSES_ELSEWHERE[name]
    with pytest.raises(ValueError, match=text):
        hvd.DistributedOptimizer(make(), backward_passes_per_step=2)


@needs_multi_optimizer
def test_distributed_optimizers_in_others_are_found() -> None:
    inside = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    multi = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(inside))
    with pytest.raises(ValueError, match="distributed already"):
        hvd.DistributedOptimizer(multi)
    assert distributed_in(keras.optimizers.LossScaleOptimizer(multi)) == [inside]


@pytest.mark.parametrize("name", ["momentum", "adamw", "schedule"])
def test_it_serialises_as_the_original(name: str) -> None:
    original = OPTIMIZERS[name]()
    original.name = "same"
    optimizer = hvd.DistributedOptimizer(original)
    assert keras.optimizers.serialize(optimizer) == keras.optimizers.serialize(original)
    restored = keras.optimizers.deserialize(through_json(keras.optimizers.serialize(optimizer)))
    assert type(restored) is type(original)


@keras.saving.register_keras_serializable(package="tests_of_mpistrat")
class Registered(keras.optimizers.SGD):
    """An optimizer of the user's own."""


def test_a_registered_class_of_the_users_serialises_too(rank: int, size: int) -> None:
    optimizer = hvd.DistributedOptimizer(Registered(0.1))
    serialised = keras.optimizers.serialize(optimizer)
    assert serialised["registered_name"] == "tests_of_mpistrat>Registered"
    assert type(keras.optimizers.deserialize(through_json(serialised))) is Registered
    assert type(keras.optimizers.deserialize(serialised)) is type(optimizer)
    variable = keras.Variable([0.0])
    optimizer.apply([tf.fill([1], rank + 1.0)], [variable])
    np.testing.assert_allclose(variable.numpy(), [-0.1 * (size + 1) / 2], rtol=1e-6)


def trained_model(rank: int, optimizer: Any) -> Any:
    keras.utils.set_random_seed(2)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    model.compile(optimizer, loss="mse", jit_compile=False)
    generator = np.random.default_rng(rank)
    for _ in range(2):
        model.train_on_batch(generator.standard_normal((4, 3)), generator.standard_normal((4, 1)))
    return model


@sample("passes", [1, 2])
@pytest.mark.parametrize("name", ["momentum", "adam", "ema"])
def test_a_built_optimizer_keeps_its_slots(name: str, passes: int, rank: int, size: int) -> None:
    original = OPTIMIZERS[name]()
    steps_with(original, [mean_gradients(size, 0), mean_gradients(size, 1)])
    before = {v.path.partition("/")[2]: v.numpy() for v in original.variables}
    assert len(before) == len(original.variables) > 2
    optimizer = hvd.DistributedOptimizer(original, backward_passes_per_step=passes)
    after = {v.path.partition("/")[2]: v.numpy() for v in optimizer.variables}
    for path in before.keys() - {"iteration"}:
        np.testing.assert_array_equal(after[path], before[path], err_msg=path)
    assert int(optimizer.iterations) == int(original.iterations) == 2  # Of updates, however many passes each takes.


def test_a_built_loss_scale_optimizer_keeps_its_slots_and_scale(rank: int, size: int) -> None:
    original = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1), initial_scale=8.0)
    bad = [np.full(shape, np.inf, np.float32) for shape in SHAPES]
    steps_with(original, [mean_gradients(size, 0), bad])
    optimizer = hvd.DistributedOptimizer(original)
    assert float(optimizer.dynamic_scale.numpy()) == 4.0
    assert_close(*([v.numpy() for v in each.variables] for each in (optimizer, original)), atol=0)


def test_wrapping_does_not_tie_the_two_optimizers_together(rank: int, size: int) -> None:
    original = keras.optimizers.SGD(0.1, momentum=0.9)
    variables = new_variables()
    original.build(variables)
    optimizer = hvd.DistributedOptimizer(original)
    optimizer.apply(list(map(tf.constant, gradients_of(rank, 0))), variables)
    assert int(original.iterations.numpy()) == 0
    assert all(not np.any(momentum.numpy()) for momentum in original.momentums)


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [
    lambda: hvd.DistributedOptimizer(keras.optimizers.SGD()),
    lambda: keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(keras.optimizers.SGD())),
    lambda: hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))],
    ids=["plain", "inside", "outside"])
def test_double_wrapping_is_refused(make: Callable) -> None:
    optimizer = make()
    with pytest.raises(ValueError, match="is distributed already; its gradients would be averaged twice"):
        hvd.DistributedOptimizer(optimizer)


@pytest.mark.horovod("optimizer-op", "predivide", "backward-passes")
@pytest.mark.parametrize("what, arguments, text", [
    ("Keras", {"optimizer": "adam"}, "takes a Keras optimizer, for example .* Received: 'adam'"),
    ("op", {"op": mpistrat.Max}, "op currently only supports Average and Sum. Received: MAX"),
    ("Adasum", {"op": mpistrat.Adasum}, "op currently only supports Average and Sum. Received: ADASUM"),
    ("passes", {"backward_passes_per_step": 0}, r"\(backward_passes_per_step=\) must be at least 1. Received: 0"),
    ("predivide and sum", {"gradient_predivide_factor": 2.0, "op": mpistrat.Sum}, "not supported with op != Average"),
    ("predivide", {"gradient_predivide_factor": -1.0}, "gradient_predivide_factor must be > 0. Received: -1"),
    ("groups", {"groups": 0}, "groups should be"),
    ("process set", {"process_set": 3}, "process_set must be a ProcessSet")],
    ids=lambda v: v if isinstance(v, str) else "")
def test_arguments_are_checked(what: str, arguments: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        hvd.DistributedOptimizer(**{"optimizer": keras.optimizers.SGD(), **arguments})


@either_way
def test_a_disagreement_names_the_variable(way: Callable, rank: int, size: int, restart: Callable) -> None:
    layer = keras.layers.Dense(2, name="odd_layer")
    layer.build((None, 3 + rank))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build(layer.trainable_variables)
    gradients = [tf.ones(v.shape) for v in layer.trainable_variables]
    with pytest.raises(tf.errors.OpError, match=r"shape of tensor \d \(odd_layer/kernel\): \(3, 2\) on ranks \[0\]; "):
        way(lambda: optimizer.apply(gradients, layer.trainable_variables))()
    if way is in_graph:
        restart()
    assert hvd.allreduce(1.0, op=hvd.Sum).numpy() == size


def test_a_gradient_that_is_none_on_some_ranks_is_named(rank: int, size: int) -> None:
    variables = [keras.Variable([0.0], name=name) for name in ("first", "second", "third")]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build(variables)
    gradients = [tf.ones([1]), tf.ones([1]) if rank == 0 else None, tf.ones([1])]
    with pytest.raises(mpistrat.MismatchError, match=(
            r"disagree on number of tensors: 3 on ranks \[0\]; 2 on ranks \[.*\]\. Only some ranks have a gradient "
            r"for second \(ranks \[0\]\): a gradient that is None is left out\.$")):
        optimizer.apply(gradients, variables)


@either_way
def test_gradients_of_other_variables_are_not_mixed(way: Callable, rank: int, size: int, restart: Callable) -> None:
    # As many on all ranks, and of one shape: the second rank lacks another one than the first.
    variables = [keras.Variable([0.0], name=name) for name in ("first", "second", "third")]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build(variables)
    gradients = [tf.ones([1]) if i != min(rank, 1) else None for i in range(3)]
    with pytest.raises(tf.errors.OpError, match=r"disagree on which tensors of the list they submit: \[1, 2\] on ranks "
                                                r"\[0\]; \[0, 2\] on ranks \[.*Only some ranks have a gradient for "):
        way(lambda: optimizer.apply(gradients, variables))()
    if way is in_graph:
        restart()
    shared = [None, tf.fill([1], float(rank)), tf.ones([1])]
    optimizer.apply(shared, variables)  # None on all ranks is no disagreement.
    assert variables[1].numpy().tolist() == pytest.approx([-0.1 * (size - 1) / 2])


def test_a_commit_between_two_updates_has_the_gradients_of_all_ranks() -> None:
    own = keras.Variable([1.0], name="own")
    largest = keras.Variable([0.0], name="largest")
    largest.overwrite_with_gradient = True
    variables = [*new_variables(), own, largest]
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    optimizer.register_local_var(own)
    optimizer.build(variables)
    gradients = [*gradients_of(mpistrat.rank(), 0), np.float32([mpistrat.rank()]), np.float32([mpistrat.rank()])]
    optimizer.apply(list(map(tf.constant, gradients)), variables)
    model._trainable_variables.extend(variables)
    state = hvd.elastic.KerasState(model, optimizer)
    assert state._compare(1) is (mpistrat.size() > 1)
    mean = np.mean([gradients_of(rank, 0)[0] for rank in range(mpistrat.size())], axis=0)
    *shared, of_own, of_largest = optimizer._accumulated_gradients
    np.testing.assert_allclose(shared[0], mean, rtol=1e-5)
    assert_equal_on_all_ranks(shared)
    assert of_own.numpy() == [mpistrat.rank()]
    assert of_largest.numpy() == [mpistrat.size() - 1]
