"""Sharded: a mix-in for optimizer classes. Each rank updates its parts of the variables, and has the state for them.

The class has the bases Sharded, the mix-in that averages gradients, and the Keras class (optimizers/optimizer.py makes
it). Keras' `apply` gets this rank's parts as its variables, with the gradients of the parts. So Keras' own code does
weight decay, moving averages of weights and accumulation. Clipping uses the norms of whole gradients.

The module also replaces Keras' functions that save and load models, so that files have the whole state.
"""

import inspect
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import keras
import tensorflow as tf
from keras.callbacks import BackupAndRestore
from keras.optimizers import Optimizer

from ...core.errors import InvalidRequestError, ShutdownError
from ...process.launch_env import launched_rank
from ...tensorflow import files
from ...tensorflow.bridge.types import OptionalGradient, Tensor, Variable
from ...tensorflow.elastic import divided_states
from ...tensorflow.gradients import indices_of
from ...tensorflow.kerases import is_keras2, steps_of
from ..bridge.patches import Function, replaces
from ..bridge.private_names import legacy_h5_format, passes_on, saving_lib, states_in
from ..bridge.training import StrategyTraining, average_statistics, is_under_strategy
from ..clone import original_class
from .parts import Parts
from .shard_state import WholeState

# These classes compute each element of a variable only from the same element of the gradient and of the state.
_ELEMENT_WISE = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lion", "Nadam", "RMSprop", "SGD")
_INSTEAD = 'Use hvd.DistributedOptimizer, or MPIStrategy(variables="mirrored").'
_NO_LOCAL = f"a sharded optimizer does not support local variables (register_local_var, local_layers). {_INSTEAD}"


def require_shardable(optimizer: Optimizer, uneven: str) -> None:
    """Raise InvalidRequestError if the state of an optimizer cannot be divided."""
    cls = type(optimizer)
    if is_keras2(optimizer):
        raise InvalidRequestError(f"ShardedOptimizer needs an optimizer of Keras 3. {_INSTEAD} "
                                  f"Received: {cls.__name__} of Keras 2 (tf_keras)")
    if passes_on(optimizer):
        raise InvalidRequestError(f"{cls.__name__} passes gradients on to its inner optimizers, which have the state. "
                                  f"Shard the inner optimizers: {cls.__name__}(hvd.ShardedOptimizer(...)).")
    require_update_step(cls)
    if uneven == "join":
        raise InvalidRequestError('a sharded optimizer does not support uneven="join", since it needs every rank in '
                                  "every step. Use hvd.DistributedOptimizer, or give all ranks the same number of "
                                  "batches.")


def require_update_step(cls: type[Optimizer]) -> None:
    """Raise InvalidRequestError if an optimizer class has no update_step, because its update cannot be divided then."""
    if cls.update_step is Optimizer.update_step:
        raise InvalidRequestError(f"{cls.__name__} has no update_step(), so its update cannot be divided among the "
                                  f"ranks. {_INSTEAD}")


class Sharded:
    """The mix-in of sharded optimizers. Each rank updates its parts of the variables."""

    _mpistrat: Any
    is_distributed: bool

    # -- variables -----------------------------------------------------------------------------------------------------

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Create the optimizer state for this rank's parts. Local; all ranks must pass the same variables."""
        own = self._mpistrat
        if own.parts is None and own.reducer_or_none is not None and own.reducer.process_set.has_others():
            own.reducer.require_no_strategy()
            if own.reducer.has_local:
                raise InvalidRequestError(_NO_LOCAL)
            if self.gradient_accumulation_steps and indices_of(variables):  # type: ignore[attr-defined]
                raise InvalidRequestError("a sharded optimizer cannot accumulate gradients if the model has variables "
                                          f"that a gradient overwrites (float8). {_INSTEAD}")
            # User-defined classes get whole variables.
            is_split = own.owner is None and original_class(type(self)) in [
                getattr(keras.optimizers, name, None) for name in _ELEMENT_WISE]
            own.parts = Parts(variables, own.reducer, is_split, own.owner)
            own.whole = WholeState(own.parts, steps_of(self))  # type: ignore[arg-type]
            super().build(own.parts.noting)  # type: ignore[misc]
            own.whole.variables = super().variables  # type: ignore[misc]
        else:
            super().build(variables)  # type: ignore[misc]

    def add_variable_from_reference(self, reference_variable: keras.Variable, *args: object,
                                    **kwargs: object) -> keras.Variable:
        parts = self._mpistrat.parts
        with nullcontext() if parts is None else parts.made_for(reference_variable):
            return super().add_variable_from_reference(reference_variable, *args, **kwargs)  # type: ignore[misc]

    def _track_variable(self, variable: keras.Variable) -> None:
        if self._mpistrat.parts is not None:
            self._mpistrat.parts.note(variable)
        super()._track_variable(variable)  # type: ignore[misc]

    @property
    def variables(self) -> list[Any]:
        """The variables that all ranks have, such as the step counter, without the state of this rank's parts."""
        is_divided = self._mpistrat.whole is not None
        return self._mpistrat.whole.shown() if is_divided else super().variables  # type: ignore[misc]

    def register_local_var(self, variable: Variable) -> None:
        raise InvalidRequestError(_NO_LOCAL)

    # -- a step --------------------------------------------------------------------------------------------------------

    def _mpistrat_apply(self, grads: list[OptionalGradient], given: list[keras.Variable] | None,
                        variables: list[keras.Variable]) -> tf.Tensor | None:
        if not self.built:  # type: ignore[attr-defined]
            self.build(variables)
        parts: Parts | None = self._mpistrat.parts
        if parts is None:
            return super()._mpistrat_apply(grads, given, variables)  # type: ignore[misc]
        self._mpistrat.whole.forget()  # The step changes the state.
        self._filter_empty_gradients(grads, variables)  # type: ignore[attr-defined]  # For its errors and warnings.
        gradients: list[OptionalGradient] = [None] * len(parts.variables)
        for variable, gradient in zip(variables, grads, strict=True):
            gradients[parts.index_of(variable)] = gradient
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        gradients = parts.reduce(gradients)
        own = parts.updated(present)
        parts.read(own)
        original_class(type(self)).apply(self, [gradients[i] for i in own], [parts.shards[i] for i in own])
        has_averages = self.use_ema and self.ema_overwrite_frequency  # type: ignore[attr-defined]
        changed = range(len(parts.variables)) if has_averages else present

        def publish() -> tf.Tensor:
            parts.publish(changed)
            return tf.constant(0)

        steps = self.gradient_accumulation_steps  # type: ignore[attr-defined]
        if steps:
            tf.cond(self._iterations.value % steps == 0, publish, lambda: tf.constant(0))  # type: ignore[attr-defined]
        else:
            publish()
        # Keras has constrained whole variables. A second time would round again.
        for variable in [parts.variables[i] for i in present if parts.plan.is_split]:
            if variable.constraint is not None:
                variable.assign(variable.constraint(variable))
        return None

    def _backend_apply_gradients(self, grads: Sequence[OptionalGradient],
                                 trainable_variables: Sequence[keras.Variable]) -> None:
        if self._mpistrat.parts is None:
            return super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]
        self._mpistrat.parts.begin(trainable_variables)
        original_class(type(self))._backend_apply_gradients(self, grads, trainable_variables)
        return None

    def _clip_gradients(self, grads: list[Tensor]) -> list[OptionalGradient]:
        parts: Parts | None = self._mpistrat.parts
        if parts is None:
            return super()._clip_gradients(grads)  # type: ignore[misc]
        factor = self._mpistrat.factor
        if self.gradient_accumulation_steps and factor != 1.0:  # type: ignore[attr-defined]
            grads = [_scaled(g, factor) for g in grads]
        each, all_of_them = self.clipnorm, self.global_clipnorm  # type: ignore[attr-defined]
        if each and parts.plan.is_split:
            squares, _ = parts.squares(grads)
            return [_scaled(g, each / tf.maximum(tf.sqrt(square), each))
                    for g, square in zip(grads, squares, strict=True)]
        if all_of_them:
            norm = tf.sqrt(parts.squares(grads)[1])
            # Keras' formula: a norm that is not finite makes all gradients NaN.
            return [_scaled(g, all_of_them * tf.minimum(1 / norm, 1 / all_of_them) + (norm - norm)) for g in grads]
        return original_class(type(self))._clip_gradients(self, grads)

    def _use_weight_decay(self, variable: Variable) -> bool:
        parts = self._mpistrat.parts
        return super()._use_weight_decay(  # type: ignore[misc]
            variable if parts is None else parts.original_of(variable))

    def _update_model_variables_moving_average(self, trainable_variables: Sequence[keras.Variable]) -> None:
        super()._update_model_variables_moving_average(self._mpistrat_shards(trainable_variables))  # type: ignore[misc]

    def _overwrite_model_variables_with_average_value(self, trainable_variables: Sequence[keras.Variable]) -> None:
        super()._overwrite_model_variables_with_average_value(  # type: ignore[misc]
            self._mpistrat_shards(trainable_variables))

    def _mpistrat_shards(self, variables: Sequence[keras.Variable]) -> Sequence[keras.Variable]:
        return variables if self._mpistrat.parts is None else self._mpistrat.parts.shards

    def finalize_variable_values(self, var_list: Sequence[keras.Variable]) -> None:
        """Call the original method. With `use_ema`, all ranks then gather the weights of all parts. Collective."""
        super().finalize_variable_values(var_list)  # type: ignore[misc]
        parts = self._mpistrat.parts
        if parts is not None and self.use_ema:  # type: ignore[attr-defined]
            parts.publish(range(len(parts.variables)))

    # -- files ---------------------------------------------------------------------------------------------------------

    def consolidate_state(self, to: int | None = 0) -> None:
        """Gather the whole state on a rank, which can then save the optimizer until the next step. Collective.

        fit calls this method for rank 0 at the end of each epoch, and before a ModelCheckpoint saves within an epoch.
        Before the first step, and in one process, the method does nothing.

        Args:
            to: A rank of the job; None: all ranks of the optimizer's process set. The whole state takes memory there.
        """
        if self._mpistrat.whole is not None:
            self._mpistrat.whole.consolidate(to)

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: object) -> Any:
        # Under a strategy all ranks call tf.train.Checkpoint, which gathers the state before one writes.
        if save_type == "checkpoint" and self._mpistrat.parts is not None and self.is_distributed:
            raise InvalidRequestError("tf.train.Checkpoint would save only this rank's part of a sharded optimizer. "
                                      "Save the model with model.save() or model.save_weights().")
        return super()._trackable_children(save_type, **kwargs)  # type: ignore[misc]


divided_states.append(lambda optimizer: states_in([optimizer]))


def _scaled(gradient: Tensor, factor: float | tf.Tensor) -> Tensor:
    return keras.ops.multiply(gradient, tf.cast(factor, gradient.dtype))


# -- Keras' functions that save and load optimizers and models ---------------------------------------------------------
#
# The functions that save a model, and BackupAndRestore, replace files atomically. They write to a temporary directory
# next to the file, and rename the new file at the end. So a process that dies while it saves leaves the old file, and
# ranks that save to one path at the same time leave a complete file. Local, except for a model of a strategy: all ranks
# save such a model, one rank writes, and all ranks wait for it (tensorflow/files.py).

_ENDINGS = (".keras", ".h5", ".hdf5")


@contextmanager
def whole_state(optimizer: Optimizer, is_read: bool) -> Iterator[None]:
    """Return a context in which the attribute `variables`, also of inner optimizers, has the whole state. Local.

    Assigning a whole value in the context changes this rank's part. `is_read`: Whether values are read; if so, raises
    InvalidRequestError on a rank that does not have the whole state (see consolidate_state).
    """
    with ExitStack() as stack:
        for state in states_in([optimizer]):
            stack.enter_context(state.showing(is_read))
        yield


@replaces(Optimizer, "save_own_variables", "a file would have a part of the state of a sharded optimizer",
          "variable.numpy()")
def save_own_variables(original: Function, self: Optimizer, store: object) -> Any:
    with whole_state(self, is_read=True):
        return original(self, store)


@replaces(Optimizer, "load_own_variables", "likewise", "len(store.keys())")
def load_own_variables(original: Function, self: Optimizer, store: object) -> Any:
    with whole_state(self, is_read=False):
        return original(self, store)


@replaces(keras.Model, "export", "all ranks would write to one file at the same time", "export_saved_model")
def export(original: Function, model: keras.Model, filepath: object, *args: object, **kwargs: object) -> object:
    return _by_all_ranks(model, filepath, lambda: original(model, filepath, *args, **kwargs))


@replaces(saving_lib, "save_model", "a process that dies while it saves would destroy the file",
          "_save_model_to_fileobj(")
@replaces(saving_lib, "save_weights_only", "likewise", "H5IOStore(filepath")
@replaces(legacy_h5_format, "save_model_to_hdf5", "likewise, or a file would have a part of the state of a sharded "
          "optimizer", 'h5py.File(filepath, mode="w")')
def save(original: Function, model: Any, filepath: object, *args: object, **kwargs: object) -> object:
    def write() -> object:
        call = inspect.signature(original).bind(model, filepath, *args, **kwargs)
        # save_model_to_hdf5, which alone has this argument, reads `variables` of the optimizer.
        has_state = "include_optimizer" in call.signature.parameters and call.arguments.get("include_optimizer", True)
        with whole_state(getattr(model, "optimizer", None) if has_state else None, is_read=True):
            return _save_whole(original, call, filepath)
    return _by_all_ranks(model, filepath, write)


def _by_all_ranks(model: object, filepath: object, write: Callable[[], object]) -> object:
    """Write a model by `write`. For a model of a strategy this is collective: one rank writes, and the others wait."""
    is_alone = files.is_alone() or hasattr(filepath, "write")
    if is_alone or not isinstance(model, keras.Model) or not is_under_strategy(model):
        return write()
    training = StrategyTraining(model)
    # If the other ranks have ended, this rank saves its own statistics; files.exchange_status says why.
    with suppress(ShutdownError):
        average_statistics(training)
    with training.known_values():
        files.write_once(str(filepath), write, training.consolidate if states_in(training.parts) else None)
    return None


def _save_whole(original: Function, call: inspect.BoundArguments, filepath: object) -> object:
    # A link stays, and its target gets the model.
    path = os.path.realpath(filepath) if isinstance(filepath, str | os.PathLike) else ""
    directory, name = os.path.split(path)
    is_one_file = name.endswith(_ENDINGS) and call.arguments.get("max_shard_size") is None
    if not is_one_file or not os.path.isdir(directory) or not os.access(directory, os.W_OK):
        return original(*call.args, **call.kwargs)
    # A directory, since programs look for the newest file with this ending. The name is the same in the next job, so
    # that processes that die leave one directory per rank at most.
    own = os.path.join(directory, f".{name}.saving-{launched_rank(os.environ)}")
    os.makedirs(own, exist_ok=True)
    try:
        call.arguments["filepath"] = os.path.join(own, name)
        result = original(*call.args, **call.kwargs)
        os.replace(os.path.join(own, name), path)
    finally:
        shutil.rmtree(own, ignore_errors=True)  # An error here would hide Keras' error.
    return result


@replaces(BackupAndRestore, "_save_model", "a process that dies while it saves would destroy the file with the epoch",
          "json.dumps(training_metadata)")
def save_backup(original: Function, self: BackupAndRestore) -> None:
    path = getattr(self, "_training_metadata_path", None)  # Keras 3.0 saves the weights alone.
    if path is None or "://" in str(self.backup_dir):
        return original(self)
    part = self._training_metadata_path = f"{path}.saving"
    if os.path.exists(path):
        shutil.copyfile(path, part)  # With double_checkpoint Keras keeps a copy of the file before it writes.
    try:
        original(self)
        os.replace(part, path)
    finally:
        self._training_metadata_path = path
        with suppress(OSError):  # The file does not exist, or Keras has raised an error.
            os.remove(part)
    return None
