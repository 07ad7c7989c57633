"""Compiled functions on a device that is not the host: CPU:1 takes the place of a GPU.

XLA refuses a variable of another device on any machine: "Trying to access resource ... located in device CPU:0 from
device CPU:1". So each way to train runs here compiled on CPU:1, and its weights are compared with those of the same
training that is not compiled. Prints "right" on each rank.
"""

import sys

import numpy as np
import tensorflow as tf

HOST, DEVICE = "CPU:0", "CPU:1"
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2)

import keras  # noqa: E402

import mpistrat.keras as hvd  # noqa: E402
from mpistrat.tensorflow import DistributedGradientTape, MPIStrategy  # noqa: E402
from mpistrat.tensorflow.ops import allreduce  # noqa: E402
from mpistrat.tensorflow.xla import context  # noqa: E402

context.device_of_compiled = lambda: DEVICE
ROWS, COLUMNS, CLASSES = 48, 6, 3


def data(rank: int, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(5)
    x, y = random.normal(size=(ROWS, COLUMNS)).astype("float32"), random.integers(0, CLASSES, ROWS)
    return x[rank::ranks], y[rank::ranks]


def new_model(dtype: str = "float32") -> keras.Model:
    keras.utils.set_random_seed(3)
    return keras.Sequential([
        keras.Input((COLUMNS,)), keras.layers.Dense(8, "relu", dtype=dtype), keras.layers.BatchNormalization(),
        keras.layers.Dense(CLASSES, dtype=dtype)])


def optimizer(**more: object) -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(0.01, global_clipnorm=1.0, **more)


LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def fit(is_compiled: bool, distributed: keras.optimizers.Optimizer) -> list[np.ndarray]:
    model = new_model()
    model.compile(distributed, LOSS, metrics=["accuracy"], jit_compile=is_compiled)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.Throughput(),
                 hvd.callbacks.MetricAverageCallback(weighted=True)]
    x, y = data(hvd.rank(), hvd.size())
    found = model.fit(x, y, batch_size=6, epochs=2, shuffle=False, verbose=0, validation_data=(x, y),
                      callbacks=callbacks)
    assert found.history["rows_per_second"][-1] > 0
    return model.get_weights()


def horovod(is_compiled: bool) -> list[np.ndarray]:
    return fit(is_compiled, hvd.DistributedOptimizer(optimizer()))


def accumulated(is_compiled: bool) -> list[np.ndarray]:
    return fit(is_compiled, hvd.DistributedOptimizer(optimizer(), backward_passes_per_step=2))


def scaled(is_compiled: bool) -> list[np.ndarray]:
    return fit(is_compiled, hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer())))


def strategy(is_compiled: bool) -> list[np.ndarray]:
    with MPIStrategy(device=DEVICE).scope():
        model = new_model()
        model.compile(optimizer(), LOSS, metrics=["accuracy"], jit_compile=is_compiled)
    x, y = data(0, 1)
    model.fit(x[:44], y[:44], batch_size=12, epochs=2, shuffle=False, verbose=0, validation_data=(x, y))
    return model.get_weights()


def tape(is_compiled: bool) -> list[np.ndarray]:
    model, steps = new_model(), optimizer()
    steps.build(model.trainable_variables)
    hvd.broadcast_variables([variable.value for variable in model.variables], 0)

    @tf.function(jit_compile=is_compiled)
    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as watched:
            loss = LOSS(y, model(x, training=False))
        gradients = DistributedGradientTape(watched).gradient(loss, model.trainable_variables)
        steps.apply(gradients, model.trainable_variables)

    x, y = data(hvd.rank(), hvd.size())
    for start in range(0, len(x), 6):
        step(tf.constant(x[start:start + 6]), tf.constant(y[start:start + 6]))
    return model.get_weights()


def embedding(is_compiled: bool) -> list[np.ndarray]:
    """Slices, of other numbers of rows on each rank: where XLA compiles for another device they are averaged dense."""
    table = tf.Variable(tf.reshape(tf.range(20.0), [10, 2]))
    steps = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    steps.build([table])

    @tf.function(jit_compile=is_compiled)
    def step(rows: tf.Tensor) -> None:
        with tf.GradientTape() as watched:
            loss = tf.reduce_sum(tf.gather(table, rows) ** 2)
        steps.apply(watched.gradient(loss, [table]), [table])

    for number in range(4):
        step(tf.constant([1, 3, number, 3][:3 + hvd.rank() % 2]))
    return [table.numpy()]


def functions(is_compiled: bool) -> list[np.ndarray]:
    """Compiled functions that another function calls: in program order also if they share nothing else."""
    @tf.function(jit_compile=is_compiled)
    def first(x: tf.Tensor) -> tf.Tensor:
        return allreduce(x, name="first", op=hvd.Sum) + 1.0

    @tf.function(jit_compile=is_compiled)
    def second(x: tf.Tensor) -> tf.Tensor:
        def body(i: int, y: tf.Tensor) -> tuple:
            return i + 1, allreduce(y, name="second", op=hvd.Sum)

        return tf.while_loop(lambda i, _: i < 2, body, (0, x))[1]

    @tf.function
    def outer(x: tf.Tensor, y: tf.Tensor) -> tuple:
        return first(x), second(y), first(y)

    graph = outer.get_concrete_function(tf.TensorSpec([4]), tf.TensorSpec([4])).graph
    calls = [each for each in graph.get_operations() if "PartitionedCall" in each.type]
    assert len(calls) == 3
    for number, call in enumerate(calls):
        assert set(calls[:number]) <= before(call), f"{call.name} may run before {[each.name for each in calls]}"
    return [result.numpy() for result in outer(tf.ones([4]), tf.fill([4], 2.0))]


def before(operation: tf.Operation) -> set[tf.Operation]:
    """All that runs before an operation, through inputs and control inputs."""
    seen: set[tf.Operation] = set()
    waiting = [operation]
    while waiting:
        each = waiting.pop()
        for other in [*each.control_inputs, *(tensor.op for tensor in each.inputs)]:
            if other not in seen:
                seen.add(other)
                waiting.append(other)
    return seen


hvd.init()
for way in (horovod, accumulated, scaled, strategy, tape, embedding, functions):
    if sys.argv[1:] and way.__name__ not in sys.argv[1:]:
        continue
    with tf.device(DEVICE):
        compiled, plain = way(True), way(False)
    for mine, reference in zip(compiled, plain, strict=True):
        np.testing.assert_allclose(mine, reference, rtol=2e-4, atol=2e-5, err_msg=way.__name__)
    for other in hvd.allgather_object([array.tobytes() for array in compiled]):
        assert other == [array.tobytes() for array in compiled], f"{way.__name__}: the ranks differ"
    print(f"rank {hvd.rank()}: {way.__name__} right", flush=True)
