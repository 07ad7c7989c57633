"""Random models, each drawn from a number: layers, widths, optimizer, options, and the way of training."""

import random
from collections.abc import Callable
from typing import Any

import keras
from keras import layers, optimizers

from mpistrat.tensorflow import Compression

from ...support.overwritten import LargestOfBatch
from .training import CLASSES, WAYS, Recipe

_WIDTHS = (1, 3, 8, 16, 17, 32, 48, 63, 64, 96, 100, 112, 120, 128, 130)
_LARGE_WIDTHS = (256, 384, 500, 512)
_TOKENS, _MANY_TOKENS = 40, 1000
_OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGD": optimizers.SGD, "Adam": optimizers.Adam, "AdamW": optimizers.AdamW, "RMSprop": optimizers.RMSprop,
    "Adagrad": optimizers.Adagrad, "Adadelta": optimizers.Adadelta, "Adamax": optimizers.Adamax,
    "Nadam": optimizers.Nadam, "Ftrl": optimizers.Ftrl, "Lion": optimizers.Lion, "Lamb": optimizers.Lamb}


def random_recipe(seed: int) -> Recipe:
    """The recipe of that number; the same on all ranks."""
    chooser = random.Random(seed)
    way = chooser.choice([*WAYS, "fit", "fit"])
    kind = chooser.choice(["dense", "dense", "equal", "equal", "large", "tokens", "rows", "images", "signals"])
    policy = chooser.choice(["float32"] * 4 + ["mixed_bfloat16", "float64"])
    optimizer, has_scale = _optimizer(chooser, way)
    return Recipe(
        model=_MODELS[kind](chooser), optimizer=optimizer, way=way, steps=chooser.randint(6, 14),
        batch=chooser.randint(1, 5), tokens={"tokens": _TOKENS, "rows": _MANY_TOKENS}.get(kind, 0), policy=policy,
        takes_turns=not has_scale and chooser.random() < 0.75, distribute=_distribute(chooser, way),
        compile=_compile(chooser, way))


def _optimizer(chooser: random.Random, way: str) -> tuple[Callable[[], Any], bool]:
    """What makes the optimizer, and whether that scales the loss."""
    name = chooser.choice([*_OPTIMIZERS, "Adam", "SGD"])
    arguments: dict[str, Any] = {"learning_rate": chooser.choice([1e-3, 3e-3, 1e-2])}
    if name == "SGD":
        arguments["momentum"] = chooser.choice([0.0, 0.9])
        arguments["nesterov"] = chooser.random() < 0.3
    elif name == "RMSprop":
        arguments["momentum"], arguments["centered"] = chooser.choice([0.0, 0.5]), chooser.random() < 0.5
    elif name in ("Adam", "AdamW"):
        arguments["amsgrad"] = chooser.random() < 0.3
    clip = chooser.choice([None, None, "clipnorm", "clipvalue", "global_clipnorm"])
    if clip:
        arguments[clip] = chooser.choice([1e-3, 1e-2, 1.0])
    if chooser.random() < 0.2:
        arguments.update(use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=chooser.choice([None, 2]))
    if chooser.random() < 0.2:
        arguments["weight_decay"] = 0.01
    has_scale = way == "fit" and chooser.random() < 0.15
    if not has_scale and way != "tape" and chooser.random() < 0.2:
        arguments["gradient_accumulation_steps"] = 2

    def make() -> Any:
        optimizer = _OPTIMIZERS[name](**arguments)
        return optimizers.LossScaleOptimizer(optimizer, initial_scale=64.0) if has_scale else optimizer
    return make, has_scale


def _distribute(chooser: random.Random, way: str) -> dict[str, Any]:
    """Options of DistributedOptimizer and DistributedGradientTape alike."""
    options: dict[str, Any] = {}
    if way.startswith("strategy"):
        return options
    if chooser.random() < 0.2:
        options["compression"] = chooser.choice([Compression.fp16, Compression.bf16])
    if chooser.random() < 0.2:
        options["gradient_predivide_factor"] = 2.0
    if chooser.random() < 0.3:
        options["sparse_as_dense"] = True
    return options


def _compile(chooser: random.Random, way: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if way in ("fit", "strategy fit") and chooser.random() < 0.15:
        options["steps_per_execution"] = 2
    elif way == "fit" and chooser.random() < 0.08:
        options["run_eagerly"] = True
    return options


def _head(chooser: random.Random, depth: int, widths: tuple[int, ...]) -> list[Callable[[], Any]]:
    """Makers of dense layers, and what may stand between them."""
    makers: list[Callable[[], Any]] = []
    same = chooser.choice([None, chooser.choice(widths)])
    for _ in range(depth):
        width, bias = same or chooser.choice(widths), chooser.random() < 0.7
        activation = chooser.choice(["relu", "tanh", "gelu", None])
        makers.append(lambda width=width, bias=bias, activation=activation:
                      layers.Dense(width, activation=activation, use_bias=bias))
        between = chooser.random()
        if between < 0.12:
            makers.append(layers.BatchNormalization)
        elif between < 0.2:
            makers.append(layers.LayerNormalization)
        elif between < 0.27:
            number = chooser.randrange(10**6)
            makers.append(lambda number=number: layers.Dropout(0.2, seed=number))
        elif between < 0.34:
            makers.append(LargestOfBatch)
    outputs = chooser.choice([CLASSES, CLASSES, CLASSES + 1])
    makers.append(lambda: layers.Dense(outputs))
    return makers


def _sequence(inputs: tuple[tuple[int, ...], str], makers: list[Callable[[], Any]]) -> Callable[[], keras.Model]:
    shape, dtype = inputs
    return lambda: keras.Sequential([keras.Input(shape, dtype=dtype), *(make() for make in makers)])


def _dense(chooser: random.Random) -> Callable[[], keras.Model]:
    return _sequence(((chooser.choice(_WIDTHS),), "float32"), _head(chooser, chooser.randint(1, 14), _WIDTHS))


def _equal(chooser: random.Random) -> Callable[[], keras.Model]:
    """Many kernels that are joined, of which each begins where the alignment is, and all are a large result."""
    width, count = chooser.choice([96, 112, 120]), chooser.randint(10, 16)
    bias, activation = width != 120 and chooser.random() < 0.5, chooser.choice(["relu", "tanh"])
    hidden = [lambda: layers.Dense(width, activation=activation, use_bias=bias)] * count
    return _sequence(((width,), "float32"), [*hidden, lambda: layers.Dense(CLASSES)])


def _large(chooser: random.Random) -> Callable[[], keras.Model]:
    widths = chooser.choice([_LARGE_WIDTHS, _WIDTHS + _LARGE_WIDTHS])
    return _sequence(((chooser.choice(widths),), "float32"), _head(chooser, chooser.randint(2, 5), widths))


def _tokens(chooser: random.Random) -> Callable[[], keras.Model]:
    width, length = chooser.choice(_WIDTHS), chooser.randint(1, 8)
    body = chooser.choice([layers.Flatten, layers.GlobalAveragePooling1D, lambda: layers.GRU(16),
                           lambda: layers.LSTM(12)])
    return _sequence(((length,), "int32"), [lambda: layers.Embedding(_TOKENS, width), body,
                                            *_head(chooser, chooser.randint(0, 5), _WIDTHS)])


def _rows(chooser: random.Random) -> Callable[[], keras.Model]:
    """An embedding of which so many rows are looked up in a step that TensorFlow takes several threads."""
    width, length = chooser.choice((8, 17, 64)), chooser.choice((600, 1100))
    return _sequence(((length,), "int32"), [lambda: layers.Embedding(_MANY_TOKENS, width),
                                            layers.GlobalAveragePooling1D, *_head(chooser, 1, _WIDTHS)])


def _images(chooser: random.Random) -> Callable[[], keras.Model]:
    filters, kernel = chooser.choice([4, 8, 13, 16, 32]), chooser.choice([1, 3])
    makers: list[Callable[[], Any]] = []
    for _ in range(chooser.randint(1, 4)):
        bias, normalises = chooser.random() < 0.5, chooser.random() < 0.5
        makers.append(lambda bias=bias: layers.Conv2D(filters, kernel, padding="same", use_bias=bias))
        if normalises:
            makers.append(layers.BatchNormalization)
        makers.append(layers.ReLU)
    return _sequence(((6, 6, 3), "float32"), [*makers, layers.GlobalAveragePooling2D,
                                              *_head(chooser, chooser.randint(0, 3), _WIDTHS)])


def _signals(chooser: random.Random) -> Callable[[], keras.Model]:
    filters = chooser.choice([8, 16, 24])
    return _sequence(((12, 5), "float32"), [
        lambda: layers.Conv1D(filters, 3, padding="same"), lambda: layers.DepthwiseConv1D(3),
        chooser.choice([layers.Flatten, layers.GlobalMaxPooling1D]), *_head(chooser, chooser.randint(0, 4), _WIDTHS)])


_MODELS = {"dense": _dense, "equal": _equal, "large": _large, "tokens": _tokens, "rows": _rows, "images": _images,
           "signals": _signals}
