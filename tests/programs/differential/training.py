"""A training of a Keras model by a recipe, in any of the ways that users train."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import mpistrat.keras as hvd
from mpistrat.keras.nested_optimizers import states_in
from mpistrat.keras.sharded.optimizer import whole_state
from mpistrat.tensorflow import DistributedGradientTape, MPIStrategy
from mpistrat.tensorflow.overwritten import places_of

from .turns import Turns, in_turns

# So many that the bias of the last layer, which comes first in a bucket, leaves the others aligned to 64 bytes.
CLASSES = 16
WAYS = ("fit", "tape", "strategy fit", "strategy loop")
# Through which door the same training is made otherwise: Horovod's, or MPIStrategy.
_OTHER_DOOR = {"fit": "strategy fit", "tape": "strategy loop", "strategy fit": "fit", "strategy loop": "tape"}
# Arguments of DistributedOptimizer that MPIStrategy has too, or that only choose among exact factors.
_OF_BOTH_DOORS = {"sparse_as_dense", "gradient_predivide_factor"}


@dataclass(frozen=True)
class Recipe:
    """What to train, and how."""

    model: Callable[[], keras.Model]  # Makes the model; its weights are drawn by Keras' global seed.
    optimizer: Callable[[], keras.optimizers.Optimizer]  # Makes the optimizer.
    way: str = "fit"  # One of WAYS.
    steps: int = 12  # How many there are. They are one epoch.
    batch: int = 4  # Rows of each rank in a step.
    tokens: int = 0  # The inputs are whole numbers below this, for an embedding; 0: they are normally distributed.
    classes: int = CLASSES  # How many outputs the model has, of which a label names one.
    policy: str = "float32"  # Keras' dtype policy.
    takes_turns: bool = True  # Whether the ranks apply gradients one after the other; see turns.py.
    # Whether TensorFlow computes the same bits in each run, with several inter-op threads. An AddN of three tensors,
    # which the gradient of a BatchNormalization ends with, adds first to the one whose memory no other operation reads
    # any more, and that depends on the order in which threads execute operations.
    is_repeatable: bool = True
    # Whether the doors round differently, and are compared within rounding: a gradient is an AddN of three tensors or
    # more, whose order depends on the graph around it, or is quantised by its largest value.
    rounds_by_door: bool = False
    # More arguments for DistributedOptimizer or DistributedGradientTape.
    distribute: Mapping[str, Any] = field(default_factory=dict)
    compile: Mapping[str, Any] = field(default_factory=dict)  # More arguments for Model.compile.
    jit_compile: bool = False  # Whether XLA compiles the step.
    # Makes the callback of fit by which the ranks average weights, in place of gradients.
    averaging: Callable[[], Any] | None = None

    @property
    def can_be_compiled(self) -> bool:
        """Whether XLA can compile the step: it is not eager."""
        return not self.compile.get("run_eagerly")

    def compiled(self) -> "Recipe":
        """The same training with XLA; without turns, as XLA cannot call their Python functions."""
        return replace(self, takes_turns=False, jit_compile=True)

    @property
    def has_other_door(self) -> bool:
        """Whether the other door can train the same, up to the division by the number of ranks.

        MPIStrategy divides the loss, and Horovod's way the sum of the gradients. In float16 a part may be too small.
        Turns in clipping, which the strategy does not take, have TensorFlow compute the norm in another order.
        """
        if self.averaging is not None:
            return False
        optimizer = self.optimizer()
        clips = any(getattr(optimizer, name) for name in ("clipnorm", "global_clipnorm", "clipvalue"))
        return set(self.distribute) <= _OF_BOTH_DOORS and self.policy != "mixed_float16" \
            and not (self.takes_turns and clips)

    def by_other_door(self) -> "Recipe":
        """The same training through the other door."""
        return replace(self, way=_OTHER_DOOR[self.way])

    @property
    def can_be_sharded(self) -> bool:
        """Whether the state of the optimizer can be divided among the ranks."""
        optimizer = self.optimizer()
        if optimizer.gradient_accumulation_steps and places_of(self.model().trainable_variables):
            return False
        return self.way.startswith("strategy") or (self.way == "fit" and not hasattr(optimizer, "inner_optimizer"))

    @property
    def is_same_when_sharded(self) -> bool:
        """Whether it has the same bits then: nothing is summed but the gradients of the ranks, once."""
        optimizer = self.optimizer()
        sums = ("clipnorm", "global_clipnorm", "gradient_accumulation_steps")
        return not isinstance(optimizer, keras.optimizers.Lamb) and not any(getattr(optimizer, each) for each in sums)

    def sharded(self) -> "Recipe":
        """The same training with the state divided; without turns, in which ranks would wait for others' gathers."""
        return replace(self, takes_turns=False, distribute={**self.distribute, "shard_state": True})

    @property
    def sends_halves(self) -> bool:
        """Whether gradients are reduced in half precision."""
        return "compression" in self.distribute


@dataclass(frozen=True)
class Trained:
    """What a training leaves on one rank."""

    # Whether the same training with other rounding comes near: the model draws no random numbers in a step, of which
    # XLA has others than TensorFlow, and no step is the sign of a number, which may be nearly 0 (Lion).
    is_near: bool
    moved: np.ndarray  # By how much each weight has changed, all in one row, in double precision.
    # What all ranks must have the same bits of: the weights, and the state of the optimizer.
    shared: dict[str, np.ndarray]
    # What is this rank's alone, and must be the same in each leg: losses, running statistics, and gradients that have
    # been accumulated.
    own: dict[str, np.ndarray]

    @property
    def course(self) -> dict[str, np.ndarray]:
        """What is near that of the same training with other rounding."""
        return {"losses": self.own["losses"], "moved": self.moved}


def train(recipe: Recipe, seed: int = 1) -> Trained:
    """Train as `recipe` says, between init and shutdown. Collective; the same from run to run."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(recipe.policy)
    turns = Turns() if recipe.takes_turns else None
    try:
        trained = _WAYS[recipe.way](recipe, turns, seed)
    finally:
        keras.config.set_dtype_policy(before)
    if turns is not None:
        turns.close()
    return trained


def _optimizer(recipe: Recipe, turns: Turns | None) -> keras.optimizers.Optimizer:
    optimizer = recipe.optimizer()
    return optimizer if turns is None else in_turns(optimizer, turns)


def _loss() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _data(recipe: Recipe, model: keras.Model, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows of all ranks: the global batches, in which the ranks' parts are in order."""
    generator, rows = np.random.default_rng(seed), recipe.steps * recipe.batch * hvd.size()
    shape = model.input_shape[1:]
    if recipe.tokens:
        x = generator.integers(0, recipe.tokens, (rows, *shape))
    else:
        x = generator.normal(size=(rows, *shape)).astype(np.float32)
    return x, generator.integers(0, recipe.classes, rows)


def _own_data(recipe: Recipe, model: keras.Model, seed: int) -> tuple[np.ndarray, ...]:
    """This rank's part of each global batch."""
    def own(rows: np.ndarray) -> np.ndarray:
        by_rank = rows.reshape(recipe.steps, hvd.size(), recipe.batch, *rows.shape[1:])
        return by_rank[:, hvd.rank()].reshape(-1, *rows.shape[1:])
    return tuple(map(own, _data(recipe, model, seed)))


def _strategy(recipe: Recipe) -> MPIStrategy:
    # Layers draw the same numbers on all ranks, as they do in Horovod's way from the same seed.
    options = {name: value for name, value in recipe.distribute.items() if name in ("sparse_as_dense", "compression")}
    is_sharded = recipe.distribute.get("shard_state", False)
    return MPIStrategy(random_per_rank=False, variables="sharded" if is_sharded else "mirrored", **options)


def _by_fit(recipe: Recipe, turns: Turns | None, seed: int) -> Trained:
    model = recipe.model()
    optimizer = _optimizer(recipe, turns)
    if recipe.averaging is None:
        optimizer = hvd.DistributedOptimizer(optimizer, **recipe.distribute)
    optimizer.build(model.trainable_variables)  # or else Keras traces every step twice
    model.compile(optimizer, _loss(), jit_compile=recipe.jit_compile or "auto", **recipe.compile)
    x, y = _own_data(recipe, model, seed)
    before = _weights(model)
    history = model.fit(x, y, batch_size=recipe.batch, epochs=1, shuffle=False, verbose=0,
                        callbacks=[recipe.averaging()] if recipe.averaging is not None else [])
    return _trained(model, optimizer, before, history.history["loss"])


def _by_tape(recipe: Recipe, turns: Turns | None, seed: int) -> Trained:
    model, loss_of = recipe.model(), _loss()
    optimizer = _optimizer(recipe, turns)
    optimizer.build(model.trainable_variables)

    @tf.function(jit_compile=recipe.jit_compile or None)
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with DistributedGradientTape(tf.GradientTape(), **recipe.distribute) as tape:
            loss = loss_of(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return _looped(recipe, model, optimizer, step, seed)


def _looped(recipe: Recipe, model: keras.Model, optimizer: keras.Optimizer,
            step: Callable[[tf.Tensor, tf.Tensor], tf.Tensor], seed: int) -> Trained:
    """A loop over this rank's batches."""
    x, y = _own_data(recipe, model, seed)
    before, losses = _weights(model), []
    for start in range(0, len(x), recipe.batch):
        rows = slice(start, start + recipe.batch)
        losses.append(step(tf.constant(x[rows]), tf.constant(y[rows])).numpy())
    return _trained(model, optimizer, before, losses)


def _by_strategy_fit(recipe: Recipe, turns: Turns | None, seed: int) -> Trained:
    with _strategy(recipe).scope():
        model = recipe.model()
        optimizer = _optimizer(recipe, turns)
        optimizer.build(model.trainable_variables)
        model.compile(optimizer, _loss(), jit_compile=recipe.jit_compile or "auto", **recipe.compile)
    before = _weights(model)
    data = tf.data.Dataset.from_tensor_slices(_data(recipe, model, seed)).batch(recipe.batch * hvd.size())
    history = model.fit(data, epochs=1, verbose=0)
    return _trained(model, optimizer, before, history.history["loss"])


def _by_strategy_loop(recipe: Recipe, turns: Turns | None, seed: int) -> Trained:
    strategy, loss_of = _strategy(recipe), _loss()
    with strategy.scope():
        model = recipe.model()
        optimizer = _optimizer(recipe, turns)
        optimizer.build(model.trainable_variables)

    @tf.function(jit_compile=recipe.jit_compile or None)
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        def of_replica(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = loss_of(y, model(x, training=True))  # Keras divides it by the number of replicas.
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss
        return strategy.reduce("SUM", strategy.run(of_replica, (x, y)), axis=None)

    return _looped(recipe, model, optimizer, step, seed)


_WAYS = dict(zip(WAYS, (_by_fit, _by_tape, _by_strategy_fit, _by_strategy_loop), strict=True))


def _weights(model: keras.Model) -> list[np.ndarray]:
    return [_array(v) for v in model.trainable_variables]


def _array(variable: Any) -> np.ndarray:
    return np.array(tf.convert_to_tensor(variable.value).numpy())


def _trained(model: keras.Model, optimizer: Any, before: list[np.ndarray], losses: Any) -> Trained:
    after = _weights(model)
    assert any(not np.array_equal(a, b) for a, b in zip(before, after, strict=True)), "nothing has been learned"
    assert all(np.isfinite(a.astype(np.float64)).all() for a in after), "the weights are not finite"
    for state in states_in([optimizer]):
        state.consolidate(to=None)
    with whole_state(optimizer, is_read=True):
        variables = list(optimizer.variables)
    shared = {f"weight {i} {v.path}": value
              for i, (v, value) in enumerate(zip(model.trainable_variables, after, strict=True))}
    own = {"losses": np.array(losses)}
    for i, v in enumerate(variables):
        # Between updates each rank has accumulated its own gradients.
        (own if "gradient_accumulator" in v.path else shared)[f"optimizer {i} {v.path}"] = np.array(v)
    own.update({f"statistic {i} {v.path}": _array(v) for i, v in enumerate(model.non_trainable_variables)})
    moved = np.concatenate([(a.astype(np.float64) - b).reshape(-1) for a, b in zip(after, before, strict=True)])
    has_signs = isinstance(getattr(optimizer, "inner_optimizer", optimizer), keras.optimizers.Lion)
    is_near = not has_signs and not any(isinstance(layer, keras.layers.Dropout) for layer in model.layers)
    return Trained(is_near, moved, shared, own)
