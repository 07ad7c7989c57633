"""init and pin_gpu: give each rank one GPU before TensorFlow uses all of them. For users; init is collective."""

import logging
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from ..api import runtime
from ..api.job import Job
from ..api.process_sets import ProcessSet
from ..core.errors import InvalidRequestError
from ..gpu.assignment import Pin, choose

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger(__name__)

_pinned: tuple[Job, Pin] | None = None


def init(comm: "MPI.Comm | Iterable[int] | None" = None,
         process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Do what mpistrat.init does, and then make TensorFlow use only this rank's GPU, as pin_gpu does. Collective.

    init() changes no GPU settings if MPISTRAT_BIND is "cores" or "none", if this process has already chosen visible
    GPUs or configured logical GPUs, or if TensorFlow has begun to use the GPUs. After init() the script may still
    choose other GPUs with tf.config.set_visible_devices, until TensorFlow begins to use them.

    Args:
        comm: As for mpistrat.init.
        process_sets: As for mpistrat.init.

    Raises:
        MpistratError: As mpistrat.init.
    """
    runtime.init(comm, process_sets)
    try:
        pin_by_default()
    except InvalidRequestError as error:
        _log_unpinned(str(error))


def pin_gpu() -> int | None:
    """Make TensorFlow use only this rank's GPU, and allocate its memory as needed.

    init() of this module calls pin_gpu(). A script needs it only where init() changes no GPU settings. Call pin_gpu()
    after init() and before any other use of TensorFlow. The ranks of a host get its GPUs in order, or the GPUs in
    CUDA_VISIBLE_DEVICES. If there are more ranks than GPUs, ranks share GPUs. Without a GPU the function does nothing.
    On each host one rank logs a line. Not collective; a repeated call does nothing.

    Returns:
        The GPU's index in tf.config.list_physical_devices("GPU"); None without a GPU.

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
            for gpu in gpus:  # All of them: the script may make another one visible, and TensorFlow wants them alike.
                if not tf.config.get_logical_device_configuration(gpu):
                    tf.config.experimental.set_memory_growth(gpu, True)
        except RuntimeError as error:
            raise InvalidRequestError(
                f"pin_gpu() comes too late ({error}). init() calls it: call init() earlier.") from error
    if topology.local_rank == 0:
        logger.log(logging.WARNING if pin.is_shared else logging.INFO, "%s: %s", topology.host, pin.sentence)
    _pinned = current, pin
    return pin.index


def pin_by_default() -> None:
    """Call pin_gpu(), unless MPISTRAT_BIND forbids it or this process has chosen its GPUs. Local. Raises as pin_gpu."""
    reason = _reason_to_leave()
    if reason:
        _log_unpinned(reason)
    else:
        pin_gpu()


def _reason_to_leave() -> str:
    """Return why the GPU settings stay as they are; "" if pin_gpu() may choose the GPU."""
    if (bind := runtime.current().settings.bind) not in ("all", "gpu"):
        return f"MPISTRAT_BIND is {bind}"
    gpus = tf.config.list_physical_devices("GPU")
    visible = tf.config.get_visible_devices("GPU")
    # The choice of an earlier init() does not bind a later one, in which this rank may have another local rank.
    index = _pinned[1].index if _pinned is not None else None
    chosen_here = index is not None and visible == [gpus[index]]
    if visible != gpus and not chosen_here:
        return f"this process has already chosen {len(visible)} of {len(gpus)} GPUs"
    if any(tf.config.get_logical_device_configuration(gpu) for gpu in gpus):
        return "this process has already configured logical GPUs"
    return ""


def _log_unpinned(reason: str) -> None:
    logger.debug("rank %d: mpistrat chooses no GPU for this rank: %s", runtime.current().topology.rank, reason)
