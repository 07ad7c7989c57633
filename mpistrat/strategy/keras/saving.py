"""Saving under MPIStrategy. Keras calls it. keras/sharded/sharded_optimizer.py has the rules for all models."""


import keras

from ...keras.bridge.patches import Function
from ...keras.bridge.patches import replaces_for_strategy as replaces
from ...keras.bridge.private_names import saving_lib
from ...tensorflow import files
from ..mpi_strategy import MPIStrategy


@replaces(saving_lib, "get_attr_skipset", "the variables of the optimizer that it makes would be broadcast",
          "ref_obj = Layer()")
def attributes_to_skip(original: Function, obj_type: str) -> set[str]:
    """Run without collectives: Keras makes an object to list the attributes of its class, on one rank."""
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
