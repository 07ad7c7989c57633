"""What of Keras is patched for MPIStrategy: applied when the first strategy is made, undone by `undo`.

Every patch does what Keras does unless an MPIStrategy is at work, and says its reason and what it was run with.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras

from ...core.errors import MissingDependencyError
from ...tensorflow.distribute import checkpoints
from . import central, files, steps
from . import trainer as new
from ._private import (
    BackupAndRestore,
    BaseOptimizer,
    CallbackList,
    LossScaleOptimizer,
    Model,
    ModelCheckpoint,
    SeedGenerator,
    SwapEMAWeights,
    TensorBoard,
    TensorFlowTrainer,
    TFOptimizer,
    Variable,
    legacy_h5_format,
    saving_lib,
    trainer,
    unknown,
)


@dataclass(frozen=True)
class Patch:
    """A function of Keras and what takes its place.

    Attributes:
        owner: The class or module that it is in.
        name: Its name there.
        make: Given the original, the replacement.
        reason: What would happen without it.
        run_with: The versions of Keras that it was run with.
    """

    owner: Any
    name: str
    make: Callable[[Any], Any]
    reason: str
    run_with: str = "3.15"


PATCHES = (
    Patch(TFOptimizer, "_all_reduce_sum_gradients", new.all_reduce_sum_gradients,
          "uneven batches would not have the gradient of the global batch, and errors not the variables' names"),
    Patch(BaseOptimizer, "_clip_gradients", new.clip_gradients,
          "each rank's own gradient would be clipped, and not their average"),
    Patch(LossScaleOptimizer, "check_finite", new.check_finite,
          "a rank with an overflow would skip the step, and the others wait for its gradients"),
    Patch(trainer, "reduce_per_replica", new.reduce_per_replica,
          "every log would be a collective of its own in every step (keras#20585)"),
    Patch(TensorFlowTrainer, "_make_function", new.make_function,
          "the number of rows would not be known, nor a model warned of that nobody synchronises"),
    Patch(TensorFlowTrainer, "_maybe_symbolic_build", new.maybe_symbolic_build,
          "the first batch would be reduced over the ranks, with strings and different numbers of rows"),
    Patch(trainer.TFEpochIterator, "__init__", new.epoch_iterator, "the ranks would shuffle in different ways"),
    Patch(CallbackList, "on_train_begin", new.on_begin, "logs that nobody reads would be reduced"),
    Patch(CallbackList, "on_test_begin", new.on_begin, "likewise"),
    Patch(CallbackList, "on_epoch_end", new.on_epoch_end,
          "a checkpoint would hold the running statistics of the chief's rows only"),
    Patch(TensorFlowTrainer, "evaluate", new.with_averaged_statistics,
          "the ranks would evaluate models of different running statistics"),
    Patch(TensorFlowTrainer, "predict", new.with_averaged_statistics, "likewise"),
    Patch(SeedGenerator, "next", new.next_seed, "all ranks would drop the same units"),
    Patch(BaseOptimizer, "add_variable", central.add_variable, "central slots would be on every rank"),
    Patch(BaseOptimizer, "apply", central.apply, "only the chief would have the new values"),
    Patch(TFOptimizer, "_distributed_tf_update_step", central.where_slots_are,
          "ranks would update with slots that they do not have"),
    Patch(BaseOptimizer, "_update_model_variables_moving_average", central.where_slots_are, "likewise"),
    Patch(TFOptimizer, "_overwrite_model_variables_with_average_value", central.where_slots_are, "likewise"),
    Patch(BaseOptimizer, "finalize_variable_values", central.finalize_variable_values,
          "only the chief's model would end with the averages"),
    Patch(BaseOptimizer, "save_own_variables", central.where_slots_are,
          "a file of another rank would have slots without elements, with which it cannot be loaded"),
    Patch(SwapEMAWeights, "_tf_swap_variables", central.swap_averages, "other ranks than the chief have no averages"),
    Patch(SwapEMAWeights, "_tf_finalize_ema_values", central.keep_averages, "likewise"),
    Patch(CallbackList, "on_train_end", new.on_train_end, "an error of one rank would leave the others waiting"),
    Patch(saving_lib, "save_model", files.save, "all ranks would write to one file, at once"),
    Patch(saving_lib, "save_weights_only", files.save, "likewise"),
    Patch(legacy_h5_format, "save_model_to_hdf5", files.save, "likewise"),
    Patch(Model, "export", files.save, "likewise"),
    Patch(ModelCheckpoint, "_save_model", files.checkpoint_of_callback, "likewise"),
    Patch(BackupAndRestore, "_save_model", files.backup, "likewise"),
    Patch(BackupAndRestore, "on_train_begin", files.restore, "ranks that see no backup would begin anew"),
    Patch(BackupAndRestore, "on_train_end", files.end_backup, "a rank would delete what another is about to delete"),
    Patch(Variable, "_copy_trackable_to_cpu", files.copy_to_cpu,
          "the second asynchronous checkpoint would fail, as it does without strategies: it makes variables anew"),
    Patch(TensorBoard, "_write_keras_model_summary", files.deferred,
          "all ranks would write events, before it is known which of them is to"),
    Patch(TensorBoard, "_configure_embeddings", files.deferred, "likewise"),
)
# With 3.7 and 3.8 the numbers of `fit` are wrong, and 3.9 fails.
OLDEST = (3, 10)
_originals: list[tuple[Patch, Any]] = []


def check() -> None:
    """Raise MissingDependencyError where Keras is too old, or lacks something that is patched."""
    if tuple(int(part) for part in keras.__version__.split(".")[:2]) < OLDEST:
        raise MissingDependencyError(f"MPIStrategy needs Keras {OLDEST[0]}.{OLDEST[1]} or later, and this is "
                                     f"{keras.__version__} (pip install 'keras>={OLDEST[0]}.{OLDEST[1]}').")
    missing = [f"{patch.owner.__name__}.{patch.name}" for patch in PATCHES if not hasattr(patch.owner, patch.name)]
    if missing:
        raise unknown(f"it has no {', '.join(missing)}")


def apply() -> None:
    """Patch Keras; once. Raises as `check`."""
    if _originals:
        return
    check()
    TensorFlowTrainer._mpistrat_logs_wanted = True
    steps.create_shared()
    for patch in PATCHES:
        original = getattr(patch.owner, patch.name)
        _originals.append((patch, original))
        setattr(patch.owner, patch.name, patch.make(original))


def undo() -> None:
    """Put back what `apply` has replaced, and what writes checkpoints."""
    checkpoints.undo()
    while _originals:
        patch, original = _originals.pop()
        setattr(patch.owner, patch.name, original)
