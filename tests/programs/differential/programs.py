"""The programs that have names: what users train with, and the sizes at which gradients go other ways."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras
from keras import layers
from keras.optimizers import SGD, Adadelta, Adagrad, Adam, Adamax, Ftrl, Lamb, Lion, LossScaleOptimizer, Nadam, RMSprop

import mpistrat.keras as hvd
from mpistrat.tensorflow import Compression

from ...support.overwritten import LargestOfBatch
from .training import CLASSES, Recipe

# Kernels of up to 64 KiB are joined for the reduction; together these are more than 512 KiB, from where large results
# are treated in a way of their own.
WIDTH, DEPTH = 120, 10


def dense(width: int = WIDTH, depth: int = DEPTH, bias: bool = False) -> Callable[[], keras.Model]:
    """Makes a stack of equal layers."""
    def make() -> keras.Model:
        hidden = [layers.Dense(width, activation="relu", use_bias=bias) for _ in range(depth)]
        return keras.Sequential([keras.Input((width,)), *hidden, layers.Dense(CLASSES)])
    return make


def normalised() -> keras.Model:
    """Layers with running statistics."""
    hidden = [layer for _ in range(4) for layer in (layers.Dense(112), layers.BatchNormalization(), layers.ReLU())]
    return keras.Sequential([keras.Input((300,)), *hidden, layers.Dense(CLASSES)])


def embedded() -> keras.Model:
    """An embedding, of which the gradient is sparse, under dense layers and running statistics."""
    return keras.Sequential([keras.Input((7,), dtype="int32"), layers.Embedding(50, 24), layers.Flatten(),
                             layers.Dense(96, activation="relu"), layers.BatchNormalization(), layers.Dense(CLASSES)])


def looked_up() -> keras.Model:
    """An embedding of which each rank looks up 2048 rows in a step of four, many of them several times."""
    return keras.Sequential([keras.Input((512,), dtype="int32"), layers.Embedding(300, 32),
                             layers.GlobalAveragePooling1D(), layers.Dense(CLASSES)])


def overwritten() -> keras.Model:
    """Weights that their gradient overwrites: one of this test's, and those of float8."""
    return keras.Sequential([keras.Input((24,)), layers.Dense(32, "relu"), LargestOfBatch(),
                             layers.Dense(32, "relu", dtype="float8_from_float32"), layers.Dense(CLASSES)])


def residual(blocks: int = 4, filters: int = 32) -> Callable[[], keras.Model]:
    """Makes a small network of ResNet's kind: convolutions without biases, batch normalisation, shortcuts."""
    def make() -> keras.Model:
        image = keras.Input((8, 8, 3))
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(image)
        for _ in range(blocks):
            shortcut = x
            for _ in range(2):
                x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(layers.ReLU()(
                    layers.BatchNormalization()(x)))
            x = layers.Add()([x, shortcut])
        return keras.Model(image, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x)))
    return make


def transformer() -> keras.Model:
    """Two blocks of attention over embedded tokens."""
    tokens = keras.Input((6,), dtype="int32")
    x = layers.Embedding(40, 16)(tokens)
    for _ in range(2):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 8)(x, x))
        x = layers.LayerNormalization()(x + layers.Dense(16)(layers.Dense(32, "gelu")(x)))
    return keras.Model(tokens, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(x)))


def recurrent() -> keras.Model:
    """An LSTM over embedded tokens."""
    return keras.Sequential([keras.Input((6,), dtype="int32"), layers.Embedding(40, 17), layers.LSTM(12),
                             layers.Dropout(0.2, seed=3), layers.Dense(CLASSES)])


def signals() -> keras.Model:
    """Convolutions in one dimension."""
    return keras.Sequential([keras.Input((12, 5)), layers.Conv1D(24, 3, padding="same"), layers.DepthwiseConv1D(3),
                             layers.GlobalMaxPooling1D(), layers.LayerNormalization(), layers.Dense(CLASSES)])


def resnet50() -> keras.Model:
    """Keras' own, on small images."""
    return keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3), classes=CLASSES,
                                       classifier_activation=None)


def _adam(**arguments: Any) -> Callable[[], Adam]:
    return lambda: Adam(1e-3, **arguments)


def _momentum(**arguments: Any) -> Callable[[], SGD]:
    return lambda: SGD(0.01, momentum=0.9, **arguments)


def _looked_up(optimizer: Callable[[], Any], way: str = "fit", **distribute: Any) -> Recipe:
    return Recipe(looked_up, optimizer, way=way, tokens=300, steps=8, takes_turns=False, distribute=distribute)


def _overwritten(optimizer: Callable[[], Any], way: str = "fit") -> Recipe:
    return Recipe(overwritten, optimizer, way=way, rounds_by_door=True)


_ADAM = Recipe(dense(), _adam())
_MOMENTUM = Recipe(dense(), _momentum())

PROGRAMS: dict[str, Recipe] = {
    "adam": _ADAM,
    "adam, at the same time": replace(_ADAM, takes_turns=False, steps=40),
    "sgd with momentum": _MOMENTUM,
    "sgd with nesterov momentum": Recipe(dense(), _momentum(nesterov=True)),
    "rmsprop": Recipe(dense(), lambda: RMSprop(1e-3, momentum=0.5, centered=True)),
    "loss scale": Recipe(dense(), lambda: LossScaleOptimizer(SGD(0.01, momentum=0.9), initial_scale=256.0),
        takes_turns=False),
    "mixed precision": Recipe(dense(), _adam(), policy="mixed_bfloat16"),
    "mixed precision with loss scale": Recipe(dense(), lambda: LossScaleOptimizer(SGD(0.01, momentum=0.9),
        initial_scale=256.0), policy="mixed_float16", takes_turns=False),
    "clipped by norm": Recipe(dense(), _momentum(clipnorm=0.01)),
    "clipped by value": Recipe(dense(), _momentum(clipvalue=0.001)),
    "clipped by global norm": Recipe(dense(), _momentum(global_clipnorm=0.1)),
    "clipped by global norm, at the same time": Recipe(dense(), _momentum(global_clipnorm=0.1), takes_turns=False),
    "ema": Recipe(dense(), _momentum(use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2)),
    "gradient accumulation": Recipe(dense(), _momentum(gradient_accumulation_steps=2)),
    "backward passes per step": replace(_MOMENTUM, distribute={"backward_passes_per_step": 2}),
    "compressed": replace(_MOMENTUM, distribute={"compression": Compression.fp16}),
    "several steps per execution": replace(_MOMENTUM, compile={"steps_per_execution": 3}),
    "eager": replace(_MOMENTUM, steps=3, compile={"run_eagerly": True}),
    "tape": replace(_ADAM, way="tape"),
    "tape, momentum": replace(_MOMENTUM, way="tape"),
    "strategy fit": replace(_ADAM, way="strategy fit"),
    "strategy loop": replace(_MOMENTUM, way="strategy loop"),
    "strategy fit, accumulation": Recipe(dense(), _momentum(gradient_accumulation_steps=2), way="strategy fit"),
    "strategy fit, clipped": Recipe(dense(), _adam(clipnorm=0.01), way="strategy fit"),
    "batch normalisation": Recipe(normalised, _adam()),
    "batch normalisation, strategy": Recipe(normalised, _momentum(), way="strategy fit"),
    "embedding": Recipe(embedded, _adam(), tokens=50),
    "embedding, made dense": Recipe(embedded, _momentum(), tokens=50, distribute={"sparse_as_dense": True}),
    "embedding, strategy": Recipe(embedded, _adam(), tokens=50, way="strategy fit"),
    "repeated rows": _looked_up(lambda: SGD(0.1)),
    "repeated rows, momentum": _looked_up(_momentum(), "strategy fit"),
    "repeated rows, adam": _looked_up(_adam(), "strategy loop"),
    "repeated rows, adagrad": _looked_up(lambda: Adagrad(0.1), "strategy fit"),
    "repeated rows, adadelta": _looked_up(lambda: Adadelta(1.0), "tape"),
    "repeated rows, rmsprop": _looked_up(lambda: RMSprop(1e-3), "strategy loop"),
    "repeated rows, ftrl": _looked_up(lambda: Ftrl(0.1)),
    "repeated rows, lamb": _looked_up(lambda: Lamb(0.01)),
    "repeated rows, tape": _looked_up(lambda: SGD(0.1), "tape"),
    "repeated rows, strategy": _looked_up(lambda: SGD(0.1), "strategy fit"),
    "repeated rows, clipped": _looked_up(lambda: SGD(0.1, global_clipnorm=0.01)),
    "repeated rows, accumulated": _looked_up(lambda: SGD(0.1, gradient_accumulation_steps=2)),
    "repeated rows, loss scale": _looked_up(lambda: LossScaleOptimizer(SGD(0.1), initial_scale=64.0)),
    "repeated rows, made dense": _looked_up(lambda: SGD(0.1), sparse_as_dense=True),
    "overwritten weights": _overwritten(_adam()),
    "overwritten weights, tape": _overwritten(_momentum(), "tape"),
    "overwritten weights, accumulation": _overwritten(_momentum(gradient_accumulation_steps=2)),
    "overwritten weights, strategy": _overwritten(_momentum(), "strategy fit"),
    "overwritten weights, strategy loop, accumulation": _overwritten(_momentum(gradient_accumulation_steps=2),
        "strategy loop"),
    "widths of 16": Recipe(dense(96, 15, bias=True), _momentum()),
    "widths of no power": Recipe(dense(97, 15, bias=True), _momentum()),
    "twenty layers of 96": Recipe(dense(96, 20, bias=True), _adam()),
    "twenty layers of 96, at the same time": Recipe(dense(96, 20, bias=True), _adam(), takes_turns=False, steps=40),
    "many small": Recipe(dense(9, 60, bias=True), _momentum()),
    "local SGD": Recipe(normalised, _momentum(), takes_turns=False, averaging=lambda: hvd.callbacks.LocalSGD(every=3,
        warmup=2, average_slots=True)),
    "DiLoCo": Recipe(dense(97, 15, bias=True), _adam(), takes_turns=False,
        averaging=lambda: hvd.callbacks.DiLoCo(every=4, average_slots=True)),
    "few large": Recipe(dense(512, 3), _momentum()),
    "more than a bucket": Recipe(dense(2048, 2), _momentum(), takes_turns=False, steps=3),
    "several buckets": Recipe(dense(1024, 9), _momentum(), takes_turns=False, steps=3),
    "a network like ResNet": Recipe(residual(), _momentum()),
    "a small network like ResNet": Recipe(residual(2, 16), _momentum()),
    "a transformer": Recipe(transformer, _adam(), tokens=40, rounds_by_door=True),
    "recurrent": Recipe(recurrent, lambda: Nadam(1e-3), tokens=40),
    "signals, strategy": Recipe(signals, lambda: Adamax(1e-3), way="strategy fit", rounds_by_door=True),
    "in double precision": Recipe(dense(17, 3, bias=True), lambda: Lion(1e-3, weight_decay=0.01), policy="float64"),
    "divided before and after the sum": replace(_MOMENTUM, distribute={"gradient_predivide_factor": 2.0}),
    "resnet50": Recipe(resnet50, _momentum(), steps=8, batch=2, is_repeatable=False),
    "resnet50, at the same time": Recipe(resnet50, _adam(), steps=12, batch=2, takes_turns=False, is_repeatable=False),
    "resnet50, strategy": Recipe(resnet50, _momentum(), steps=4, batch=2, way="strategy fit", is_repeatable=False),
}
