"""This rank's GPU by TensorFlow's names of it."""

from functools import cache
from typing import TYPE_CHECKING

import tensorflow as tf

from ...api.interop.own_gpu import this_ranks_gpu

if TYPE_CHECKING:
    from ...gpu.device import Device  # It needs cupy.


def device_at(where: str) -> "Device":
    """This rank's GPU, by TensorFlow's name of it. Raises as `api.interop.own_gpu.this_ranks_gpu`."""
    return this_ranks_gpu(cuda_number(where))


@cache
def cuda_number(where: str) -> int:
    """The CUDA device number of one of TensorFlow's logical GPUs.

    TensorFlow numbers physical GPUs as CUDA does. It makes one logical GPU of each visible physical one, or as many as
    the script has configured, in the order of the physical ones, whatever the order in set_visible_devices
    (`_compute_device_options` in TensorFlow's eager/context.py).
    """
    physical, visible = tf.config.list_physical_devices("GPU"), tf.config.get_visible_devices("GPU")
    logical = [i for i, gpu in enumerate(physical) if gpu in visible
               for _ in tf.config.get_logical_device_configuration(gpu) or [None]]
    number = tf.DeviceSpec.from_string(where).device_index or 0
    return logical[number] if number < len(logical) else number


@cache
def has_gpu() -> bool:
    """Whether TensorFlow sees a GPU."""
    # Cached: the call takes a microsecond per tensor, which matters on a machine without a GPU.
    return len(tf.config.list_physical_devices("GPU")) > 0
