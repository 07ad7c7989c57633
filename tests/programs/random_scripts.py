"""Random small training scripts, in Horovod's way and under MPIStrategy, each compared with one process.

A script makes a model and an optimizer, and then goes through some stages: training by fit or by a loop of its own,
with callbacks and functions in functions; saving and loading; copies of models and optimizers; errors that it catches;
threads, process sets and joins. All ranks must have the same bits of weights and of the optimizer's state after each
stage, and nearly those of the same script in one process with the same global batches, where the script means the same.
In some scripts a rank does alone what all have to do. They may end with an error of mpistrat, on all ranks. The others
run twice: in both ways, which must have the same bits on 2, 4, 8 ... ranks, where it is exact to divide by their
number; or in another leg, with the same bits: over MPI, between made-up hosts, or without votes. The steps of some XLA
compiles the second time; these are compared with one process only.

usage: random_scripts.py SCRIPTS [FIRST [local]]

FIRST is the number of the first script. The same number gives the same script. With `local` fit trains by LocalSGD or
DiLoCo: the ranks must have the same bits, and none of the stages is an error. Exits with 1, on all ranks, if any
script has failed; goes on after one that fails.
"""

import contextlib
import copy
import hashlib
import os
import pickle
import random
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import mpistrat
import mpistrat.keras
import mpistrat.tensorflow as hvd
from mpistrat.keras.bridge.private_names import states_in
from mpistrat.keras.sharded.sharded_optimizer import whole_state
from mpistrat.tensorflow.xla import ffi
from tests.support.compiled import compiled_by_xla
from tests.support.legs import HOST_EACH, MPI, NO_VOTES, TWO_HOSTS, Leg, under

BATCH = 12  # rows of all ranks together; a number that 2, 3 and 4 divide
COLUMNS, TOKENS, OUTPUTS = 6, 20, 2
TOLERANCE = 1e-3
LIMIT_S = 240.0
HOROVOD, STRATEGY = "horovod", "strategy"
MODELS = ("dense", "shared", "tokens", "unbuilt", "normalised", "sync", "own step")
NOT_LIKE_ONE_PROCESS = ("batch norm", "dropout", "local")
# The units of hidden layers. Kernels of up to 64 KiB are joined for the reduction; the second has more than 512 KiB of
# them, from where large results are treated in a way of their own. The last fills more than a bucket between hosts.
SIZES = ((8,), (120,) * 10, (8,), (512,) * 6)
COMPILED = Leg("compiled")
LEGS = (MPI, TWO_HOSTS, NO_VOTES, COMPILED)
WITH_XLA = ("train", "save", "rate", "predict", "copy", "freeze")
OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "sgd": lambda: keras.optimizers.SGD(0.05),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "clipped": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.3),
    "adam": lambda: keras.optimizers.Adam(0.01, epsilon=1e-3),
    "decay": lambda: keras.optimizers.AdamW(0.01, epsilon=1e-3, weight_decay=0.02, clipnorm=0.5),
    "schedule": lambda: keras.optimizers.RMSprop(
        keras.optimizers.schedules.ExponentialDecay(0.01, 3, 0.8), epsilon=1e-3),
    "averages": lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3),
    "accumulates": lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=2),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=8.0)}
EVERYWHERE = ("train", "train", "save", "copy", "rate", "predict", "caught")
IN_FIT = ("backup", "freeze")
IN_HOROVODS_WAY = ("thread", "process_set")
# Nothing compares weights in a loop of the script's own after its first steps.
WRONG = ("wrong_error",)
WRONG_IN_FIT = ("wrong_load", "wrong_rate", "wrong_copy", "wrong_assignment", "wrong_stop", "wrong_adapt",
                "wrong_rate_callback")


@dataclass(frozen=True)
class Script:
    """What a script does. The details of each stage are drawn when it runs, from the number and the place."""

    number: int  # Its number, from which all of it is drawn.
    door: str  # HOROVOD or STRATEGY.
    loop: str  # fit; tape or optimizer, which say what averages; or strategy, a loop under the strategy.
    model: str  # One of MODELS or NOT_LIKE_ONE_PROCESS.
    optimizer: str  # One of OPTIMIZERS.
    stages: tuple[str, ...]  # Names of methods of Run.
    seeds_differ: bool  # Each rank draws other initial weights, and gets those of rank 0 by a broadcast.
    joins: bool  # The ranks have different numbers of batches.
    is_eager: bool  # fit runs without graphs, and the loop makes its steps eagerly. One process always does.
    execution: int  # The steps of fit in one execution.
    is_for_both: bool = False  # It runs through both doors, and draws what both have.
    is_local: bool = False  # Weights are averaged, and not gradients.
    is_sharded: bool = False  # The state of optimizers is divided among the ranks.
    units: tuple[int, ...] = (8,)  # One of SIZES.
    leg: Leg = MPI  # In which it runs the second time, if that is not through the other door.

    def by_local_sgd(self) -> "Script":
        """The script in which the ranks average weights."""
        return replace(self, door=HOROVOD, loop="fit", is_for_both=False, is_local=True, is_sharded=False,
                       model="dense" if self.model in ("sync", "local") else self.model,
                       stages=tuple(s for s in self.stages if not s.startswith("wrong") and s != "process_set"))

    def through(self, door: str) -> "Script":
        loop = self.loop if self.loop == "fit" else "strategy" if door == STRATEGY else "optimizer"
        return replace(self, door=door, loop=loop)

    @property
    def is_like_one_process(self) -> bool:
        return self.model not in NOT_LIKE_ONE_PROCESS and not self.joins and not self.may_fail and not self.is_local

    @property
    def can_be_compiled(self) -> bool:
        """Whether XLA can compile its steps and come near one process, so that this compares as much as a leg does."""
        return set(self.stages) <= {*WITH_XLA} and self.is_like_one_process and not self.is_eager \
            and not self.is_sharded and ffi.api() is not None

    @property
    def may_fail(self) -> bool:
        return any(stage.startswith("wrong") for stage in self.stages)


def script_of(number: int) -> Script:
    draw = random.Random(number)
    door = draw.choice((HOROVOD, STRATEGY))
    is_for_both = draw.randrange(3) == 0
    is_horovods = door == HOROVOD and not is_for_both
    loop = draw.choice(("fit", "fit", "tape", "optimizer") if is_horovods else ("fit", "fit", "strategy"))
    if door == HOROVOD and loop == "strategy":
        loop = "optimizer"
    model = draw.choice(MODELS * 2 + NOT_LIKE_ONE_PROCESS)
    if (model == "local" and door == STRATEGY) or (model == "own step" and loop != "fit") \
            or (model == "batch norm" and loop != "fit"):
        model = "dense"
    optimizer = draw.choice(list(OPTIMIZERS))
    if optimizer == "scaled" and loop != "fit":
        optimizer = "sgd"  # A loop has to scale the loss by itself.
    if optimizer == "clipped" and model == "local":
        optimizer = "sgd"  # The norm of all gradients is another one on each rank.
    if is_for_both and model in ("local", "sync", "batch norm", "dropout"):
        model = "dense"
    joins = is_horovods and draw.randrange(6) == 0 and model != "local" and optimizer != "accumulates"
    kinds = EVERYWHERE + (IN_FIT if loop == "fit" else ()) + (IN_HOROVODS_WAY if is_horovods else ())
    stages = ["train", *(draw.choice(kinds) for _ in range(draw.randint(1, 3))), "train"]
    if draw.randrange(6) == 0 and not is_for_both:
        stages.insert(-1, draw.choice(WRONG + (WRONG_IN_FIT if loop == "fit" else ())))
    return Script(number, door, loop, model, optimizer, tuple(stages),
                  is_horovods and model not in ("unbuilt", "local") and draw.randrange(2) == 0, joins,
                  is_horovods and draw.randrange(2) == 0, 1 if joins else draw.choice((1, 1, 2, 3)), is_for_both,
                  # With draws of their own: a number is the script that it was before there were these.
                  is_sharded=loop != "tape" and not joins and model != "local"
                  and optimizer != "averages" and random.Random(f"sharded {number}").randrange(2) == 0,
                  units=random.Random(f"size {number}").choice(SIZES), leg=random.Random(f"leg {number}").choice(LEGS))


class Interrupted(Exception):  # noqa: N818 - what a script raises to stop itself
    """Raised by a script, and caught by it."""


# -- ways to train ----------------------------------------------------------------------------------------------------


class Alone:
    """One process with all rows. The other ways are the same, but for what they override."""

    rank, size, batch = 0, 1, BATCH
    strategy: Any = None

    def scope(self) -> Any:
        return contextlib.nullcontext()

    def optimizer(self, optimizer: Any, script: Script, local: Sequence[Any] = ()) -> Any:
        return optimizer

    def tape(self, local: Sequence[Any] = ()) -> Any:
        return tf.GradientTape()

    def part(self, rows: np.ndarray) -> np.ndarray:
        """What this rank gives to fit of the rows of some global batches."""
        return rows

    def normalization(self) -> Any:
        return keras.layers.BatchNormalization(momentum=0.8)

    def load_model(self, path: str, script: Script) -> Any:
        return keras.models.load_model(path)

    def callbacks(self) -> list[Any]:
        return []

    def averaging(self, script: Script) -> list[Any]:
        return []

    def broadcast(self, variables: Sequence[Any], root: int = 0) -> None:
        pass

    def barrier(self) -> None:
        pass


class Horovod(Alone):
    """Each rank has a part of each global batch."""

    def __init__(self) -> None:
        self.rank, self.size = hvd.rank(), hvd.size()
        self.batch = BATCH // self.size

    def optimizer(self, optimizer: Any, script: Script, local: Sequence[Any] = ()) -> Any:
        if script.loop == "tape":
            return optimizer
        uneven = "join" if script.joins and script.loop == "fit" else "error"
        if local:
            return mpistrat.keras.PartialDistributedOptimizer(optimizer, local_layers=local)
        if script.is_sharded and hasattr(optimizer, "inner_optimizer"):
            return keras.optimizers.LossScaleOptimizer(
                mpistrat.keras.ShardedOptimizer(optimizer.inner_optimizer), initial_scale=optimizer.initial_scale)
        return mpistrat.keras.DistributedOptimizer(optimizer, uneven=uneven, shard_state=script.is_sharded)

    def tape(self, local: Sequence[Any] = ()) -> Any:
        return hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=local) if local \
            else hvd.DistributedGradientTape(tf.GradientTape())

    def part(self, rows: np.ndarray) -> np.ndarray:
        by_rank = rows.reshape(-1, self.size, self.batch, *rows.shape[1:])
        return by_rank[:, self.rank].reshape(-1, *rows.shape[1:])

    def normalization(self) -> Any:
        return mpistrat.keras.SyncBatchNormalization(momentum=0.8)

    def load_model(self, path: str, script: Script) -> Any:
        if script.is_sharded and script.optimizer == "scaled":
            model = keras.models.load_model(path)
            model.compile(self.optimizer(model.optimizer, script), "mse", metrics=["mae"])
            return model
        return mpistrat.keras.load_model(path, uneven="join" if script.joins else "error",
                                         shard_state=script.is_sharded)

    def callbacks(self) -> list[Any]:
        return [mpistrat.keras.callbacks.BroadcastGlobalVariablesCallback(0)]

    def broadcast(self, variables: Sequence[Any], root: int = 0) -> None:
        hvd.broadcast_variables(variables, root)

    def barrier(self) -> None:
        mpistrat.barrier()


class Local(Horovod):
    """Each rank trains by itself, and the ranks average their weights."""

    def optimizer(self, optimizer: Any, script: Script, local: Sequence[Any] = ()) -> Any:
        return optimizer

    def load_model(self, path: str, script: Script) -> Any:
        return keras.models.load_model(path)

    def averaging(self, script: Script) -> list[Any]:
        options: dict[str, Any] = {"every": 1 + script.number % 3, "average_slots": True,
                                   "uneven": "join" if script.joins else "error"}
        callbacks = mpistrat.keras.callbacks
        return [(callbacks.LocalSGD(**options),
                 callbacks.DiLoCo(outer=keras.optimizers.SGD(0.7), **options))[script.number // 3 % 2]]


class Strategy(Alone):
    """Each rank passes all rows."""

    def __init__(self, is_sharded: bool) -> None:
        self.strategy = hvd.MPIStrategy(variables="sharded" if is_sharded else "mirrored")
        self.rank, self.size = hvd.rank(), hvd.size()

    def scope(self) -> Any:
        return self.strategy.scope()

    def normalization(self) -> Any:
        return keras.layers.BatchNormalization(momentum=0.8, synchronized=True)

    def barrier(self) -> None:
        mpistrat.barrier()


# -- models -----------------------------------------------------------------------------------------------------------


@keras.saving.register_keras_serializable("scripts")
class Unbuilt(keras.Model):
    """It has no Input layer, so its first call makes its weights."""

    def __init__(self, **arguments: Any):
        super().__init__(**arguments)
        self.hidden, self.last = keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(OUTPUTS)

    def call(self, x: Any) -> Any:
        return self.last(self.hidden(x))


@keras.saving.register_keras_serializable("scripts")
class OwnStep(keras.Model):
    def train_step(self, data: Any) -> Any:
        x, y, *_ = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=predicted)
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, predicted)
        return {metric.name: metric.result() for metric in self.metrics}


def model_of(script: Script, way: Alone) -> tuple[Any, list[Any]]:
    kind, dense = script.model, keras.layers.Dense
    if kind == "unbuilt":
        return Unbuilt(), []
    x = inputs = keras.Input((COLUMNS,))
    if kind == "tokens":
        x = keras.layers.Flatten()(keras.layers.Embedding(TOKENS, 3)(x))
    elif kind == "normalised":
        layer = keras.layers.Normalization()
        layer.adapt(data_of(random.Random(3), 4 * BATCH, kind)[0])
        x = layer(x)
    elif kind == "shared":
        layer = dense(COLUMNS, activation="tanh")
        x = layer(layer(x))
    hidden = [dense(units, activation="tanh") for units in script.units]
    for layer in hidden:
        x = layer(x)
    if kind == "sync":
        x = way.normalization()(x)
    elif kind == "batch norm":
        x = keras.layers.BatchNormalization()(x)
    elif kind == "dropout":
        x = keras.layers.Dropout(0.3)(x)
    model = (OwnStep if kind == "own step" else keras.Model)(inputs, dense(OUTPUTS)(x))
    return model, hidden[:1] if kind == "local" else []


def set_weights(model: Any, values: Sequence[np.ndarray]) -> None:
    """Set the weights, also those that a Normalization layer of Keras uses: they follow its own only after a load."""
    model.set_weights(values)
    for layer in model.layers:
        if isinstance(layer, keras.layers.Normalization):
            layer.finalize_state()


def data_of(draw: random.Random, rows: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Inputs, and a smooth function of them. The same on all ranks."""
    generator = np.random.default_rng(draw.randrange(10**9))
    if kind == "tokens":
        x = generator.integers(0, TOKENS, (rows, COLUMNS)).astype(np.float32)
        return x, np.tanh(x[:, :OUTPUTS] / TOKENS)
    x = generator.normal(size=(rows, COLUMNS)).astype(np.float32)
    return x, np.tanh(x[:, :OUTPUTS] + x[:, -OUTPUTS:])


def errors_of(y: Any, predicted: Any) -> tf.Tensor:
    return tf.reduce_mean((tf.cast(y, predicted.dtype) - predicted) ** 2, axis=-1)


class Say(keras.callbacks.Callback):
    def __init__(self, function: Callable[[int], None]):
        super().__init__()
        self._function = function

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._function(epoch)


# -- a run of a script ------------------------------------------------------------------------------------------------


class Run:
    """A script in one way on one rank. Each stage is a method that gets what draws its details."""

    def __init__(self, script: Script, way: Alone, folder: str):
        self.script, self.way, self.folder = script, way, folder
        self.results: dict[str, Any] = {}  # that all ranks and ways have, of the latest stage
        self._is_broadcast = not script.seeds_differ
        self._is_eager = script.is_eager or way.size == 1
        keras.utils.clear_session()
        keras.utils.set_random_seed(script.number + (way.rank if script.seeds_differ else 0))
        with way.scope():
            self.model, self.local = model_of(script, way)
            self._new_optimizer()
        # Ranks with other seeds would shuffle and drop in other ways.
        keras.utils.set_random_seed(script.number)

    def stages(self) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
        """Run the stages; after each, its name and what all ranks must have the same bits of."""
        for place, name in enumerate(self.script.stages):
            self.results = {}
            getattr(self, name)(random.Random(f"{self.script.number} {place}"))
            yield name, {name: np.asarray(value) for name, value in self.results.items()} | self.state()

    def state(self) -> dict[str, np.ndarray]:
        own = {id(v) for layer in self.local for v in layer.weights}
        state = {f"{number} {v.path}": np.asarray(v) for number, v in enumerate(self.model.weights)
                 if id(v) not in own and "seed" not in v.path}
        if self.script.loop != "tape" and not self.local:
            # A rank accumulates gradients of its own.
            self._consolidate()
            with whole_state(self.optimizer, is_read=True):
                state |= {f"optimizer {number} {v.path}": np.asarray(v)
                          for number, v in enumerate(self.optimizer.variables) if "accumulat" not in v.path}
        return state

    def _consolidate(self) -> None:
        """Let all ranks have the whole state of the optimizer."""
        for state in states_in([self.optimizer]):
            state.consolidate(to=None)

    @property
    def optimizer(self) -> Any:
        return self.model.optimizer if self.script.loop == "fit" else self._own

    def _new_optimizer(self) -> None:
        optimizer = self.way.optimizer(OPTIMIZERS[self.script.optimizer](), self.script, self.local)
        if self.script.loop == "fit":
            self._compile(self.model, optimizer)
        else:
            self._own = optimizer

    def _compile(self, model: keras.Model, optimizer: Any) -> None:
        model.compile(optimizer, "mse", metrics=["mae"], run_eagerly=self._is_eager,
                      steps_per_execution=self.script.execution)

    # -- training --

    def train(self, draw: random.Random) -> None:
        steps = draw.randint(2, 3)
        if self.script.loop == "fit":
            self._fit(draw, steps)
        else:
            self._loop(draw, steps)

    def _fit(self, draw: random.Random, steps: int, more: Sequence[Any] = (), epochs: int | None = None) -> None:
        way, script = self.way, self.script
        epochs = epochs or draw.randint(1, 2)
        rows = steps * BATCH - (5 if script.door == STRATEGY and not script.is_for_both and draw.randrange(3) == 0
                                else 0)
        x, y = (way.part(array) for array in data_of(draw, rows, script.model))
        if script.joins and way.rank:
            x, y = x[way.batch:], y[way.batch:]
        callbacks = [*([] if self._is_broadcast and draw.randrange(2) else way.callbacks()),
                     *self._callbacks(draw), *more, *way.averaging(script)]
        self._is_broadcast = True
        validation = data_of(draw, BATCH, script.model) if draw.randrange(3) == 0 else None
        how = draw.choice(("arrays", "dataset", "shuffled"))
        if how == "dataset":
            dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(way.batch)
            history = self.model.fit(dataset, epochs=epochs, verbose=0, callbacks=callbacks, validation_data=validation)
        else:
            # One batch is the same in any order, and the parts of the ranks are others.
            shuffles = how == "shuffled" and len(x) <= way.batch and not script.is_for_both
            history = self.model.fit(x, y, batch_size=way.batch, epochs=epochs, shuffle=shuffles, verbose=0,
                                     callbacks=callbacks, validation_data=validation)
        losses = history.history.get("loss", [])  # There are none after the backup of a last epoch.
        self.results["epochs"] = len(losses)
        if script.door == STRATEGY and not script.is_for_both:
            self.results["losses"] = losses

    def _callbacks(self, draw: random.Random) -> list[Any]:
        path = os.path.join(self.folder, f"{draw.randrange(10**9)}")
        made: list[Callable[[], Any]] = [
            lambda: keras.callbacks.ModelCheckpoint(path + ".keras", save_best_only=draw.randrange(2) == 0,
                                                    monitor="loss"),
            lambda: keras.callbacks.ModelCheckpoint(path + ".weights.h5", save_weights_only=True),
            lambda: keras.callbacks.CSVLogger(path + ".csv"),
            lambda: keras.callbacks.EarlyStopping("loss", patience=0, min_delta=0.02,
                                                  restore_best_weights=draw.randrange(2) == 0),
            lambda: keras.callbacks.TerminateOnNaN()]
        if self.script.optimizer != "schedule":
            made += [lambda: keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=0.05),
                     lambda: keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.9 * rate)]
        if self.script.optimizer == "averages":
            made.append(lambda: keras.callbacks.SwapEMAWeights(swap_on_epoch=True))
        if self.script.door == HOROVOD and not self.script.is_for_both:
            made.append(lambda: mpistrat.keras.callbacks.MetricAverageCallback()
                        if isinstance(self.way, Horovod) else keras.callbacks.TerminateOnNaN())
        return [make() for make in draw.sample(made, draw.randint(0, 2))]

    def _loop(self, draw: random.Random, steps: int) -> None:
        way, script = self.way, self.script
        x, y = (way.part(array) for array in data_of(draw, steps * BATCH, script.model))
        with way.scope():
            if not self.model.built:
                self.model(tf.constant(x[:1]))
            self.optimizer.build(self.model.trainable_variables)
        if not self._is_broadcast:
            way.broadcast([*self.model.weights, *self.optimizer.variables])
            self._is_broadcast = True
        step = self._step(draw.randrange(2) == 0)
        dataset: Any = tf.data.Dataset.from_tensor_slices((x, y)).batch(way.batch)
        if way.strategy is not None:
            dataset = way.strategy.experimental_distribute_dataset(dataset)
        for number, batch in enumerate(dataset):
            if script.joins and number >= steps - way.rank:
                break
            step(*batch)
        if script.joins and way.size > 1:
            last = int(hvd.join())
            way.broadcast([*self.model.weights, *self.optimizer.variables], last)

    def _step(self, is_nested: bool) -> Any:
        way, model, optimizer, local = self.way, self.model, self.optimizer, self.local
        own_tape = self.script.loop == "tape"
        rows = BATCH if way.strategy is not None else way.batch

        def gradients(x: Any, y: Any) -> Any:
            with way.tape(local) if own_tape else tf.GradientTape() as tape:
                loss = tf.reduce_sum(errors_of(y, model(x, training=True))) / float(rows)
            return tape.gradient(loss, model.trainable_variables)

        if is_nested and not self._is_eager:
            gradients = tf.function(gradients)

        def step(x: Any, y: Any) -> None:
            optimizer.apply_gradients(zip(gradients(x, y), model.trainable_variables, strict=True))

        if way.strategy is not None:
            return tf.function(lambda x, y: way.strategy.run(step, args=(x, y)))
        return step if self._is_eager else tf.function(step)

    # -- what scripts do between --

    def rate(self, draw: random.Random) -> None:
        if self.script.optimizer != "schedule":
            self.optimizer.learning_rate = draw.choice((0.01, 0.03))

    def predict(self, draw: random.Random) -> None:
        x, y = data_of(draw, 2 * BATCH + 5, self.script.model)
        if self.script.loop == "fit":
            self.results["evaluated"] = self.model.evaluate(x, y, batch_size=BATCH, verbose=0)
            if not self.local:
                self.results["predicted"] = self.model.predict(x, batch_size=BATCH, verbose=0)
        elif not self.local:
            self.results["predicted"] = self.model(tf.constant(x), training=False)

    def save(self, draw: random.Random) -> None:
        way, how = self.way, draw.choice(("model", "weights", "checkpoint", "arrays"))
        path = os.path.join(self.folder, f"saved{draw.randrange(10**9)}")
        with_all, on_all = ((draw.randrange(2) == 0 and how != "checkpoint") or way.strategy is not None
                            or (self.script.is_for_both and how != "checkpoint") for _ in range(2))
        on_all = on_all or self.script.is_sharded
        if self.script.is_sharded and how == "checkpoint" and (self.script.door == HOROVOD or self.script.is_for_both):
            how = "weights"
        self._consolidate()
        saves, loads = with_all or way.rank == 0, on_all or way.rank == 0
        in_scope = way.scope() if draw.randrange(2) == 0 else contextlib.nullcontext()
        if how == "model" and (self.script.loop != "fit" or self.local or not on_all):
            how = "weights"
        saved: Any = None
        with in_scope:
            if how == "checkpoint":
                checkpoint = tf.train.Checkpoint(model=self.model, optimizer=self.optimizer)
                saved = checkpoint.save(path) if saves else None
            elif how == "arrays":
                saved = [np.asarray(v) for v in self.model.weights]
            elif saves:
                getattr(self.model, "save" if how == "model" else "save_weights")(
                    path + (".keras" if how == "model" else ".weights.h5"))
        way.barrier()
        if draw.randrange(2):
            self.train(draw)
        if how == "model":
            with way.scope():
                self.model = way.load_model(path + ".keras", self.script)
            return
        if loads:
            if how == "checkpoint":
                tf.train.Checkpoint(model=self.model, optimizer=self.optimizer).restore(f"{path}-1").expect_partial()
            elif how == "arrays":
                set_weights(self.model, saved)
            else:
                self.model.load_weights(path + ".weights.h5")
        if not on_all:
            way.broadcast([*self.model.weights, *self.optimizer.variables])

    def copy(self, draw: random.Random) -> None:
        if self.local or self.script.model == "unbuilt":
            return
        how = draw.choice(("clone", "deepcopy", "pickle", "optimizer", "deserialized"))
        self._consolidate()
        with self.way.scope():
            if self.script.loop != "fit":
                if how in ("clone", "optimizer"):
                    self._own = type(self._own).from_config(self._own.get_config())
                elif how == "deserialized":
                    self._own = keras.optimizers.deserialize(keras.optimizers.serialize(self._own))
                else:
                    self._own = copy.deepcopy(self._own) if how == "deepcopy" else pickle.loads(pickle.dumps(self._own))
                self._own.build(self.model.trainable_variables)
            elif how in ("clone", "optimizer", "deserialized"):
                optimizer, clone = self.optimizer, keras.models.clone_model(self.model)
                set_weights(clone, self.model.get_weights())
                if how == "clone":
                    clone.compile_from_config(self.model.get_compile_config())
                else:
                    self._compile(clone, type(optimizer).from_config(optimizer.get_config()) if how == "optimizer"
                                  else keras.optimizers.deserialize(keras.optimizers.serialize(optimizer)))
                self.model = clone
            else:
                self.model = copy.deepcopy(self.model) if how == "deepcopy" else pickle.loads(pickle.dumps(self.model))
        self.train(draw)

    def freeze(self, draw: random.Random) -> None:
        layer = draw.choice([layer for layer in self.model.layers if layer.weights])
        layer.trainable = not layer.trainable
        if not self.model.trainable_variables:
            layer.trainable = True
        with self.way.scope():
            self._new_optimizer()

    def backup(self, draw: random.Random) -> None:
        """An interruption after an epoch, and a second fit that goes on."""
        directory = os.path.join(self.folder, f"backup{draw.randrange(10**9)}")
        at, seed, epochs = draw.randrange(3), draw.randrange(10**9), []

        def interrupt(epoch: int) -> None:
            epochs.append(epoch)
            if epoch == at and len(epochs) == at + 1:
                raise Interrupted

        for _ in range(2):
            again = random.Random(seed)
            backup = keras.callbacks.BackupAndRestore(directory)
            with contextlib.suppress(Interrupted):
                self._fit(again, 2, [backup, Say(interrupt)], epochs=3)
            self.model._initial_epoch = None  # Keras would begin each later fit there, too.
        self.results = {"epochs": epochs}

    def caught(self, draw: random.Random) -> None:
        """An error on all ranks, which the script catches; then it trains on."""
        way, how = self.way, draw.choice(("callback", "function", "input", "shapes"))
        if how == "shapes":
            with contextlib.suppress(mpistrat.MismatchError):
                if way.size > 1:
                    hvd.allreduce(tf.ones(2 + way.rank), name="caught")
                    raise AssertionError("no error")
        elif how == "function":
            @tf.function
            def fails(x: Any) -> Any:
                total = hvd.allreduce(x) if way.size > 1 and way.strategy is None else x
                with tf.control_dependencies([tf.debugging.assert_less(total, -1.0)]):
                    return tf.identity(total)
            with contextlib.suppress(tf.errors.InvalidArgumentError):
                fails(tf.constant(1.0))
                raise AssertionError("no error")
        elif self.script.loop == "fit":
            def stop(epoch: int) -> None:
                raise Interrupted

            if how == "callback":
                with contextlib.suppress(Interrupted):
                    self._fit(draw, 2, [Say(stop)])
                    raise AssertionError("no error")
            else:
                x, y = (way.part(array) for array in data_of(draw, 3 * BATCH, self.script.model))

                def unreadable(x: Any, y: Any) -> Any:
                    with tf.control_dependencies([tf.debugging.assert_less(tf.shape(x)[0], 0)]):
                        return tf.identity(x), y

                # The first batch: how far fit reads ahead of its steps depends on the way.
                dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(way.batch).map(unreadable)
                divided = [v for state in states_in([self.optimizer]) for v in state.variables]
                kept = [(v, np.array(v)) for v in (*self.model.weights, *self.optimizer.variables, *divided)]
                with contextlib.suppress(tf.errors.InvalidArgumentError):
                    self.model.fit(dataset, verbose=0, callbacks=[*way.callbacks(), *way.averaging(self.script)])
                    raise AssertionError("no error")
                # In a graph TensorFlow may run what needs no input: it counts the step, and decays weights.
                with way.scope():
                    for variable, value in kept:
                        variable.assign(value)
        self.train(draw)

    def thread(self, draw: random.Random) -> None:
        way, found = self.way, []

        def run() -> None:
            for number in range(4):
                found.append(float(hvd.allreduce(tf.constant(float(number + way.rank)), op=hvd.Sum)))

        beside = threading.Thread(target=run, name="beside")
        if way.size > 1:
            beside.start()
        self.train(draw)
        if way.size > 1:
            beside.join(LIMIT_S)
            assert found == [sum(number + rank for rank in range(way.size)) for number in range(4)], found

    def process_set(self, draw: random.Random) -> None:
        way, steps = self.way, draw.randint(1, 3)
        # One process has to draw as much.
        ranks = sorted(random.Random(draw.randrange(10**9)).sample(range(way.size), max(1, way.size - 1)))
        if way.size > 1:
            members = mpistrat.add_process_set(ranks)
            if members.included():
                weight = keras.Variable(np.zeros(3, np.float32))
                optimizer = mpistrat.keras.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=members)
                optimizer.build([weight])
                for _ in range(steps):
                    optimizer.apply([tf.fill([3], float(way.rank))], [weight])
                np.testing.assert_allclose(weight, -steps * np.mean(ranks), rtol=1e-6)
        self.train(draw)
        if way.size > 1:
            mpistrat.remove_process_set(members)

    # -- what one rank does alone --

    def wrong_load(self, draw: random.Random) -> None:
        path = os.path.join(self.folder, "alone.weights.h5")
        if self.way.rank == 0:
            other, _ = model_of(self.script, Alone())
            other(data_of(draw, 1, self.script.model)[0])
            other.save_weights(path)
            self.model.load_weights(path)
        self.train(draw)

    def wrong_assignment(self, draw: random.Random) -> None:
        if self.way.rank == self.way.size - 1:
            weight = draw.choice(self.model.trainable_variables)
            weight.assign(weight + 0.1)
        self.train(draw)

    def wrong_rate(self, draw: random.Random) -> None:
        if self.way.rank == 0 and self.script.optimizer != "schedule":
            self.optimizer.learning_rate = 0.2
        self.train(draw)

    def wrong_copy(self, draw: random.Random) -> None:
        """One rank trains a plain optimizer, or makes a new one."""
        if self.way.rank == 0:
            optimizer = OPTIMIZERS[self.script.optimizer]()
            if self.script.loop == "fit":
                self._compile(self.model, optimizer)
            else:
                self._own = optimizer
        self.train(draw)

    def wrong_error(self, draw: random.Random) -> None:
        """One rank has an error in the middle, catches it, and goes on."""
        def fail(epoch: int) -> None:
            raise Interrupted

        if self.script.loop == "fit":
            with contextlib.suppress(Interrupted):
                self._fit(draw, 2, [Say(fail)] if self.way.rank == 0 else [], epochs=3)
        else:
            self._loop(draw, 2 if self.way.rank == 0 else 3)

    def wrong_stop(self, draw: random.Random) -> None:
        def stop(epoch: int) -> None:
            self.model.stop_training = True

        self._fit(draw, 2, [Say(stop)] if self.way.rank == 0 else [], epochs=3)

    def wrong_rate_callback(self, draw: random.Random) -> None:
        halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.5 * rate)
        self._fit(draw, 2, [halve] if self.way.rank == 0 and self.script.optimizer != "schedule" else [], epochs=3)

    def wrong_adapt(self, draw: random.Random) -> None:
        x = data_of(draw, 4 * BATCH, self.script.model)[0]
        with self.way.scope():
            layer = keras.layers.Normalization()
            layer.adapt(x[self.way.rank::self.way.size] + self.way.rank)
            inputs = keras.Input((COLUMNS,))
            self.model = keras.Model(inputs, keras.layers.Dense(OUTPUTS)(layer(inputs)))
            self.local = []
            self._new_optimizer()
        self._fit(draw, 2)


# -- comparisons ------------------------------------------------------------------------------------------------------


def exchanged(own: Any) -> list[Any]:
    """The value of each rank, on all ranks; also where a rank is still in what others have left with an error."""
    try:
        return mpistrat.allgather_object(own, "exchanged")
    except mpistrat.MpistratError as error:  # The engine has ended.
        from mpi4py import MPI  # after init, which knows the threads that MPI starts
        return MPI.COMM_WORLD.allgather(own if isinstance(own, BaseException) else error)


def worst(state: dict[str, np.ndarray], right: Sequence[np.ndarray], where: str) -> tuple[float, str]:
    found = (0.0, "")
    # An optimizer, which comes last, may be built by an evaluation already. Its variables have another order then.
    assert all(name.startswith("optimizer") for name in list(state)[len(right):]), \
        f"{where}: {len(state)} values, and {len(right)} in one process"
    if len(state) > len(right):
        state = {name: value for name, value in state.items() if not name.startswith("optimizer")}
    for (name, value), wanted in zip(state.items(), right, strict=False):
        assert value.shape == wanted.shape, f"{where}: {name} {value}, and {wanted} in one process"
        if value.size:
            # NaN is no difference where both are.
            off = np.abs(value.astype(np.float64) - wanted.astype(np.float64))
            off = np.where(np.isnan(value.astype(np.float64)) & np.isnan(wanted.astype(np.float64)), 0.0, off)
            found = max(found, (float(np.max(np.nan_to_num(off, nan=np.inf))) / max(1.0, float(np.max(np.abs(wanted)))),
                                name))
    return found


def is_clear(error: BaseException) -> bool:
    """Whether an error is one of mpistrat, also where TensorFlow has wrapped it."""
    return isinstance(error, mpistrat.MpistratError) or "mpistrat" in str(error)


def states_of_one_process(script: Script) -> list[Sequence[np.ndarray]] | str:
    """What one process has after each stage, [] if that means something else; or the traceback of an error."""
    if not script.is_like_one_process:
        return []
    try:
        with tempfile.TemporaryDirectory() as folder:
            return [list(state.values()) for _, state in Run(script, Alone(), folder).stages()]
    except Exception:
        return traceback.format_exc()


def outcome_of(script: Script, folder: str) -> str:
    """Run a script on all ranks, twice where it ends well, and return how it has ended."""
    right = mpistrat.broadcast_object(states_of_one_process(script) if hvd.rank() == 0 else None, 0)
    assert not isinstance(right, str), f"one process: {right}"
    outcome, states = outcome_through_door(script, folder, right)
    other, again = script, os.path.join(folder, "again")
    os.mkdir(again)
    if script.is_for_both:
        other = script.through(STRATEGY if script.door == HOROVOD else HOROVOD)
        _, others = outcome_through_door(other, again, right)
        # In some graphs TensorFlow divides by a square root (RMSprop) as a product with rsqrt.
        is_exact = not hvd.size() & (hvd.size() - 1) and not (script.is_sharded and script.optimizer == "schedule")
        return f"{outcome}, and {differences(states, others, is_exact)} through the other door"
    if script.may_fail:
        return outcome
    leg = MPI if script.leg is COMPILED and not script.can_be_compiled else \
        HOST_EACH if script.leg is TWO_HOSTS and hvd.size() == 2 else script.leg
    with under(leg), compiled_by_xla() if leg is COMPILED else contextlib.nullcontext():
        other_outcome, others = outcome_through_door(script, again, right)
    return f"{outcome}, and {other_outcome if leg is COMPILED else differences(states, others, True)}: {leg.name}"


def digests_of(state: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {name: hashlib.sha256(value.tobytes()).digest() for name, value in state.items()}


def differences(states: Sequence[dict[str, bytes]], others: Sequence[dict[str, bytes]], is_exact: bool) -> str:
    """Which arrays differ after a stage, in a few words. Raises AssertionError if any does and `is_exact`."""
    assert len(states) == len(others), "there are different stages"
    different = [f"{name} after stage {place}" for place, (one, other) in enumerate(zip(states, others, strict=True))
                 for (name, a), b in zip(one.items(), other.values(), strict=False) if a != b
                 and (len(one) == len(other) or not name.startswith("optimizer"))]  # It may be built in one only.
    assert not different or not is_exact, f"there are different {different}"
    return f"{len(different)} other arrays" if different else "the same"


def outcome_through_door(script: Script, folder: str, right: Sequence[Sequence[np.ndarray]]
                         ) -> tuple[str, list[dict[str, bytes]]]:
    """How a script has ended through its door, and digests of the state after each stage: `right` in one process."""
    way: Alone = Local() if script.is_local else Horovod() if script.door == HOROVOD else Strategy(script.is_sharded)
    folder = mpistrat.broadcast_object(folder, 0)
    largest, states = (0.0, ""), []
    run, stages, place, name = None, None, 0, "making the model"
    while True:
        own: Any = None
        try:
            if stages is None:
                run = Run(script, way, folder)
                stages = run.stages()
                continue
            found = next(stages, None)
            if found is None:
                own = "end"
            else:
                name, state = found
                own = digests_of(state)
        except Exception as error:
            if not script.may_fail:
                traceback.print_exc()
            own = error
        everybody = exchanged(own)
        failed = [each for each in everybody if isinstance(each, BaseException)]
        if failed:
            said = {f"{type(e).__name__}: {str(e)[:300]}" for e in failed}
            # After "wrong_error" the rank that has had the error has caught it.
            least = len(everybody) - ("wrong_error" in script.stages)
            assert script.may_fail and len(failed) >= least and all(map(is_clear, failed)), \
                f"after stage {place} ({name}): {len(failed)} ranks failed: {said}"
            return f"an error on {len(failed)} ranks after stage {place} ({name}): {sorted(said)}", states
        if own == "end":
            assert all(each == "end" for each in everybody), "the ranks have different stages"
            return f"right, off by {largest[0]:.1e} {largest[1]}", states
        different = [key for key in own if any(each.get(key) != own[key] for each in everybody)]
        assert not different, f"stage {place} ({name}): the ranks have different {different}"
        if right:
            largest = max(largest, worst(state, right[place], f"stage {place} ({name})"))
            assert largest[0] <= TOLERANCE, f"stage {place} ({name}): off by {largest}"
        place += 1
        states.append(digests_of(run.state()))


def main() -> None:
    count, first = [int(word) for word in sys.argv[1:3]] + [0] * (3 - len(sys.argv))
    is_local = sys.argv[3:] == ["local"]
    os.environ.setdefault("MPISTRAT_STALL_CHECK_TIME_SECONDS", "20")
    os.environ.setdefault("MPISTRAT_STALL_SHUTDOWN_TIME_SECONDS", "60")
    tf.get_logger().setLevel("ERROR")
    failures = 0
    for number in range(first, first + count):
        script, began = script_of(number), time.monotonic()
        script = script.by_local_sgd() if is_local else script
        hvd.init()
        rank, folder = hvd.rank(), tempfile.mkdtemp()
        try:
            outcome = outcome_of(script, folder)
        except Exception as error:
            traceback.print_exc()
            outcome, failures = f"FAILED: {error}", failures + 1
        if rank == 0 or outcome.startswith("FAILED"):
            print(f"rank {rank}: {script}: {outcome} ({time.monotonic() - began:.1f} s)", flush=True)
        mpistrat.shutdown()
        shutil.rmtree(folder)
    print(f"{count - failures} of {count} scripts are right", flush=True)
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
