"""Features of Keras' optimizers: every option does to the global gradient what it does in one process."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from .common import World, assert_close, feature, points
from .keras_training import BATCH, COLUMNS, compiled, dense, sequential, sgd, trains_as_one_process

GROUP = "Keras: optimizers"


def _trains_with(world: World, optimizer: Callable, **arguments: Any) -> None:
    trains_as_one_process(world, lambda: compiled(optimizer=optimizer), **arguments)


@feature(GROUP, "Adam")
def adam(world: World) -> None:
    _trains_with(world, lambda: keras.optimizers.Adam(0.01, amsgrad=True))


@feature(GROUP, "RMSprop, Lion, Adafactor")
def other_optimizers(world: World) -> None:
    for name in ("RMSprop", "Lion", "Adafactor"):
        _trains_with(world, lambda name=name: getattr(keras.optimizers, name)(0.001), epochs=1)


@feature(GROUP, "Weight decay (AdamW)")
def weight_decay(world: World) -> None:
    _trains_with(world, lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1))


@feature(GROUP, "`clipnorm`")
def clipnorm(world: World) -> None:
    _trains_with(world, lambda: sgd(clipnorm=0.01))


@feature(GROUP, "`global_clipnorm`")
def global_clipnorm(world: World) -> None:
    _trains_with(world, lambda: sgd(global_clipnorm=0.02))


@feature(GROUP, "`clipvalue`")
def clipvalue(world: World) -> None:
    _trains_with(world, lambda: sgd(clipvalue=0.005))


@feature(GROUP, "EMA of the weights, overwritten every 3 steps")
def ema(world: World) -> None:
    _trains_with(world, lambda: sgd(use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3))


@feature(GROUP, "Gradient accumulation")
def gradient_accumulation(world: World) -> None:
    _trains_with(world, lambda: sgd(gradient_accumulation_steps=3))


@feature(GROUP, "Gradient accumulation with clipping")
def gradient_accumulation_clipped(world: World) -> None:
    _trains_with(world, lambda: sgd(gradient_accumulation_steps=2, global_clipnorm=0.02))


@feature(GROUP, "A schedule of learning rates")
def learning_rate_schedule(world: World) -> None:
    _trains_with(world, lambda: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(
        0.01, 6, warmup_target=0.1, warmup_steps=3)))


@feature(GROUP, "Mixed precision (`mixed_float16`)")
def mixed_precision(world: World) -> None:
    def build() -> Any:
        return keras.Sequential([keras.Input((COLUMNS,)),
                                 *[type(layer)(layer.units, dtype="mixed_float16") for layer in dense()]])
    trains_as_one_process(world, lambda: compiled(
        build, optimizer=lambda: keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=64.0)), atol=1e-2)


@feature(GROUP, "`LossScaleOptimizer`: an overflow on one replica")
def overflow(world: World) -> None:
    with world.strategy.scope():
        model = compiled(optimizer=lambda: keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=64.0))
    before = model.get_weights()
    x, y = points(4 * world.replicas)
    x[0] = np.inf  # In the first replica's part of the only batch.
    model.fit(x, y, batch_size=len(x), shuffle=False, verbose=0)
    assert_close(model.get_weights(), before, 0)
    assert float(model.optimizer.dynamic_scale.numpy()) == 32.0


@feature(GROUP, "Slices as gradients (`Embedding`)")
def embedding(world: World) -> None:
    def build() -> Any:
        return keras.Sequential([keras.Input((3,), dtype="int32"), keras.layers.Embedding(20, 4),
                                 keras.layers.Flatten(), keras.layers.Dense(1)])
    tokens = np.random.default_rng(2).integers(0, 20, (60, 3))
    trains_as_one_process(world, lambda: compiled(build, lambda: keras.optimizers.Adam(0.01)),
                          data=(tokens, points(60)[1]))


@feature(GROUP, "A gradient that is `None`")
def no_gradient(world: World) -> None:
    class Unused(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.unused = self.add_weight(shape=(2,), name="unused")

        def call(self, inputs: Any) -> Any:
            return inputs
    trains_as_one_process(world, lambda: compiled(lambda: sequential(Unused())), batch_size=BATCH)
