"""pin_gpu: assigns one GPU to each rank, before TensorFlow takes all of them."""

import logging
import os

import tensorflow as tf

from ..api import runtime
from ..core.errors import InvalidRequestError
from ..gpu.assignment import Pin, choose

logger = logging.getLogger(__name__)

_pinned: tuple[runtime.Runtime, Pin] | None = None


def pin_gpu() -> int | None:
    """Make TensorFlow use only this rank's GPU, and allocate its memory as needed.

    Call it after init() and before any other use of TensorFlow. The ranks of a host get its GPUs in order, or those
    that CUDA_VISIBLE_DEVICES names. If there are more ranks than GPUs, ranks share GPUs. Without a GPU it does nothing.
    It logs one line per host. Not collective; a repeated call does nothing.

    Returns:
        The GPU's index among those that this process saw before; None without a GPU.

    Raises:
        InvalidRequestError: TensorFlow has begun to use the GPUs already.
        NotInitializedError: Before init().
    """
    global _pinned
    current = runtime.current()
    if _pinned is not None and _pinned[0] is current:
        return _pinned[1].index
    topology = current.topology
    gpus = tf.config.list_physical_devices("GPU")
    pin = choose(topology.local_rank, topology.local_size, len(gpus), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if pin.index is not None:
        try:
            tf.config.set_visible_devices(gpus[pin.index], "GPU")
            tf.config.experimental.set_memory_growth(gpus[pin.index], True)
        except RuntimeError as error:
            raise InvalidRequestError(f"pin_gpu() comes too late: {error} Call it right after init().") from error
    if topology.local_rank == 0:
        logger.log(logging.WARNING if pin.is_shared else logging.INFO, "%s: %s", topology.host, pin.sentence)
    _pinned = current, pin
    return pin.index
