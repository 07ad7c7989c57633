"""tf.distribute.experimental.CommunicationOptions: the meaning of each field under MPIStrategy.

bytes_per_pack: the size of the buckets in which the tensors of one call are reduced; 0: the size in core.tuning, which
    is larger on a GPU.
timeout_seconds: the time after which a collective that only some ranks have called ends the job, instead of
    MPISTRAT_STALL_SHUTDOWN_TIME_SECONDS. It is set in the engine, so it applies to all later collectives.
implementation: NCCL logs a warning where NCCL is not available. RING and AUTO have no effect; mpistrat's settings do.
"""

import logging
from typing import TypeAlias

import tensorflow as tf

from ..api import array_ops, common, runtime
from ..core.errors import InvalidRequestError
from ..tensorflow.bridge import names

logger = logging.getLogger(__name__)

CommunicationOptions: TypeAlias = tf.distribute.experimental.CommunicationOptions


def agreed(options: CommunicationOptions | None) -> CommunicationOptions:
    """Check the options of a strategy, apply them to the engine, and return them, or the defaults. Collective.

    Raises:
        ValueError: On this rank if `options` are not CommunicationOptions; on every rank if the ranks' options differ.
    """
    if options is not None and not hasattr(options, "bytes_per_pack"):
        raise ValueError("communication_options must be tf.distribute.experimental.CommunicationOptions. "
                         f"Received: {options!r}")
    options = options or CommunicationOptions()
    own = {"bytes_per_pack": options.bytes_per_pack, "timeout_seconds": options.timeout_seconds,
           "implementation": options.implementation.value}
    everybody = array_ops.allgather_object(own, names.eager("strategy/options"))
    if any(other != everybody[0] for other in everybody):
        raise InvalidRequestError("communication_options differ among the ranks: "
                                  + "; ".join(f"{other} on rank {rank}" for rank, other in enumerate(everybody)))
    nccl = tf.distribute.experimental.CommunicationImplementation.NCCL
    if options.implementation == nccl and not common.nccl_built() and common.rank() == 0:
        logger.warning("CommunicationOptions ask for NCCL, which is not available. MPI reduces the tensors.")
    apply_timeout(options)
    return options


def apply_timeout(options: CommunicationOptions) -> None:
    """Set the engine's stall limit to the timeout in the options, if there is one."""
    if options.timeout_seconds is not None:
        if options.timeout_seconds <= 0:
            raise InvalidRequestError("CommunicationOptions.timeout_seconds must be above 0. "
                                      f"Received: {options.timeout_seconds!r}")
        runtime.current().engine.controller.abort_stalls_after(float(options.timeout_seconds),
                                                               "CommunicationOptions.timeout_seconds")
