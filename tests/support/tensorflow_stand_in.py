"""TensorFlow's memory on the host in place of a GPU's, so that its tensors go the way of GPU tensors without one."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from mpistrat.api import own_gpu
from mpistrat.gpu import dlpack
from mpistrat.tensorflow.bridge import gpu_eager, gpu_graph
from tests.support import gpu_stand_in


class StandIn(gpu_stand_in.Device):
    """Takes TensorFlow's memory on the host for the GPU's."""

    dlpack_type = dlpack.CPU


def install(rank: int, replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Let all tensors of this process go the way of GPU tensors: eager ones, and those of graphs."""
    replace(own_gpu, "make_device", lambda number: StandIn(seed=rank))
    replace(gpu_eager, "are_on_gpu", lambda tensors: True)
    replace(gpu_graph, "device_of", lambda tensors: None if tf.executing_eagerly() else "/device:CPU:0")
