"""Finds this rank's GPU by TensorFlow's name of the device."""

from functools import cache
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import tensorflow as tf

from ...api import runtime
from ...api.job import Job
from ...api.tensors import this_ranks_gpu, why_no_cupy
from ...core.errors import InvalidRequestError
from ...gpu.proof import one_line
from .private_names import context

if TYPE_CHECKING:
    from ...gpu.device import Device  # It needs cupy.

_problems: "WeakKeyDictionary[Job, str]" = WeakKeyDictionary()


def device_at(where: str) -> "Device":
    """Return this rank's GPU, which TensorFlow calls `where`. Raises the errors of `api.tensors.this_ranks_gpu`."""
    return this_ranks_gpu(cuda_number(where))


def why_no_gpu(where: str) -> str:
    """Return why the engine cannot use TensorFlow's GPU `where`, or "". Raises InvalidRequestError as device_at does.

    The first call opens the GPU. This fails if cupy is missing or cannot use the driver, or if the GPU is full or
    reserved by another process. If `where` is "", no GPU is opened: only an already known problem is returned.
    """
    if why_no_cupy():
        return f"cupy is missing: {why_no_cupy()}"
    current = runtime.current()
    if where and current not in _problems:
        try:
            device_at(where)
            _problems[current] = ""
        except InvalidRequestError:
            raise
        except Exception as error:
            _problems[current] = f"cupy cannot use the GPU: {type(error).__name__}: {one_line(error)}"
    return _problems.get(current, "")


@cache
def cuda_number(where: str) -> int:
    """Return the CUDA device number of TensorFlow's logical GPU `where`.

    TensorFlow numbers physical GPUs as CUDA does. It makes one logical GPU of each visible physical GPU, or as many as
    the script has configured. The logical GPUs are in the order of the physical GPUs, not in the order of the argument
    of set_visible_devices (see `_compute_device_options` in TensorFlow's eager/context.py).
    """
    physical, visible = tf.config.list_physical_devices("GPU"), tf.config.get_visible_devices("GPU")
    logical = [i for i, gpu in enumerate(physical) if gpu in visible
               for _ in tf.config.get_logical_device_configuration(gpu) or [None]]
    number = tf.DeviceSpec.from_string(where).device_index or 0
    return logical[number] if number < len(logical) else number


def has_gpu() -> bool:
    """Return whether TensorFlow uses a GPU. A script may change this until TensorFlow has begun to use its devices."""
    return _has_gpu() if context()._initialized else bool(tf.config.get_visible_devices("GPU"))


@cache
def _has_gpu() -> bool:
    # Cached: the call takes a microsecond per tensor, which matters on a machine without a GPU.
    return bool(tf.config.get_visible_devices("GPU"))
