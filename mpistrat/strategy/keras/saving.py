"""Saving under MPIStrategy: functions that write a model to a file. All ranks call them, the chief writes, all wait.

See tensorflow.files for hosts that share no file system. Callbacks that save are in `callbacks`. Called by
Keras in place of its own functions.
"""

import os
from typing import BinaryIO

import keras

from ...core.errors import ShutdownError
from ...keras._private import legacy_h5_format, saving_lib
from ...keras.patches import Function
from ...keras.patches import replaces_for_strategy as replaces
from ...tensorflow import files
from ..checkpoints import with_values_of
from ..mpi_strategy import MPIStrategy
from .step_state import strategy_of
from .trainer import average_statistics


def writes_together(model: keras.Model) -> bool:
    """Whether all ranks take part in writing this model: they have copies of it, and none is being written."""
    return strategy_of(model) is not None and not files.is_alone()


@replaces(saving_lib, "save_model", "all ranks would write to one file at the same time", "_save_model_to_fileobj(")
@replaces(saving_lib, "save_weights_only", "likewise", "H5IOStore(filepath")
@replaces(legacy_h5_format, "save_model_to_hdf5", "likewise", 'h5py.File(filepath, mode="w")')
@replaces(keras.Model, "export", "likewise", "export_saved_model")
def save(original: Function, model: keras.Model, filepath: str | os.PathLike | BinaryIO, *args: object,
         **kwargs: object) -> object:
    if not isinstance(model, keras.Model) or not writes_together(model) or hasattr(filepath, "write"):
        return original(model, filepath, *args, **kwargs)
    try:
        average_statistics(model)
    except ShutdownError:
        # The other ranks have ended, so this rank saves its own statistics. files.exchange_status
        # explains why that is no error.
        pass
    with with_values_of(model):
        return files.write_once(str(filepath), lambda: original(model, filepath, *args, **kwargs))


@replaces(saving_lib, "get_attr_skipset", "the variables of the optimizer that it makes would be broadcast",
          "ref_obj = Layer()")
def attributes_to_skip(original: Function, obj_type: str) -> set[str]:
    """Keras makes an object to list the attributes of its class, on whichever rank saves or loads."""
    with files.alone():
        return original(obj_type)


@replaces(keras.Variable, "_copy_trackable_to_cpu",
          "the second asynchronous checkpoint would fail, as it does without strategies: Keras makes a new variable",
          "tf.Variable(object_map[self.value])")
def copy_to_cpu(original: Function, self: keras.Variable, object_map: dict) -> None:
    """An asynchronous checkpoint copies each variable to the CPU; from the second one on it reuses the copy."""
    if self not in object_map or not isinstance(self.value.distribute_strategy, MPIStrategy):
        return original(self, object_map)
    self.value._copy_trackable_to_cpu(object_map)
    object_map[self].assign(object_map[self.value])
    return None
