"""tf.distribute.experimental.CommunicationOptions: what each of its fields means here.

bytes_per_pack: the size of the buckets in which the tensors of one call are reduced; 0: core.tuning.BUCKET_BYTES.
timeout_seconds: after how long a collective that only some ranks have called ends the job, in place of
    MPISTRAT_STALL_SHUTDOWN_TIME_SECONDS. It is the engine's, and so holds for all that follows, whoever calls it.
implementation: NCCL is warned of where it is not there. RING and AUTO: shared memory or MPI, as the settings say.
"""

import logging
from typing import Any

import tensorflow as tf

from ...api import basics, runtime
from ...api import ops as array_ops
from ...core.errors import InvalidRequestError
from ...core.tuning import BUCKET_BYTES
from .threads import wire_name

logger = logging.getLogger(__name__)


def agreed(options: Any) -> tf.distribute.experimental.CommunicationOptions:
    """The options that a strategy was given, or the default ones; checked, and applied to the engine. Collective.

    Raises:
        ValueError: Not CommunicationOptions, on this rank; or not the same on all ranks, on every rank.
    """
    if options is not None and not hasattr(options, "bytes_per_pack"):
        raise ValueError("communication_options must be tf.distribute.experimental.CommunicationOptions. "
                         f"Received: {options!r}")
    options = options or tf.distribute.experimental.CommunicationOptions()
    everybody = array_ops.allgather_object(_fields(options), wire_name("options"))
    if any(other != everybody[0] for other in everybody):
        raise InvalidRequestError("communication_options differ among the ranks: "
                                  + "; ".join(f"{other} on rank {rank}" for rank, other in enumerate(everybody)))
    nccl = tf.distribute.experimental.CommunicationImplementation.NCCL
    if options.implementation == nccl and not basics.nccl_built() and basics.rank() == 0:
        logger.warning("CommunicationOptions ask for NCCL, which is not there; tensors are reduced over MPI.")
    apply_timeout(options)
    return options


def apply_timeout(options: Any) -> None:
    """Let the engine end stalls as the options say, if they do."""
    if options.timeout_seconds is not None:
        if options.timeout_seconds <= 0:
            raise InvalidRequestError("CommunicationOptions.timeout_seconds must be above 0. "
                                      f"Received: {options.timeout_seconds!r}")
        runtime.current().engine.controller.abort_stalls_after(float(options.timeout_seconds),
                                                               "CommunicationOptions.timeout_seconds")


def bucket_bytes(options: Any) -> int:
    """The size of the buckets that tensors are reduced in."""
    return int(options.bytes_per_pack) or BUCKET_BYTES


def _fields(options: Any) -> dict[str, Any]:
    return {"bytes_per_pack": options.bytes_per_pack, "timeout_seconds": options.timeout_seconds,
            "implementation": options.implementation.value}
