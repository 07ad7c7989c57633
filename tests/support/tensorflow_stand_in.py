"""TensorFlow's memory on the host in place of a GPU's, so that its tensors go the way of GPU tensors without one."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from mpistrat.api.interop import own_gpu
from mpistrat.gpu import dlpack
from mpistrat.tensorflow.async_op import streams
from mpistrat.tensorflow.bridge import gpu_eager, gpu_graph
from mpistrat.tensorflow.xla import context, gpu_memory
from tests.support import gpu_stand_in


class StandIn(gpu_stand_in.Device):
    """Takes TensorFlow's memory on the host for the GPU's."""

    dlpack_type = dlpack.CPU


def install(rank: int, replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Let all tensors of this process go the way of GPU tensors: eager ones, those of graphs, and XLA's."""
    def place_of(call: Any) -> tuple[StandIn, gpu_stand_in.Stream]:
        device: Any = own_gpu.this_ranks_gpu(0)
        return device, device.current_stream()

    replace(own_gpu, "make_device", lambda number: StandIn(seed=rank))
    replace(streams, "WAYS", {"the stand-in's": lambda device, where: device.current_stream()})
    replace(gpu_eager, "are_on_gpu", lambda tensors: True)
    replace(gpu_graph, "device_of", lambda tensors: None if tf.executing_eagerly() or context.is_compiled()
            else "/device:CPU:0")
    replace(gpu_memory, "is_used", lambda: True)
    replace(gpu_memory, "place_of", place_of)
