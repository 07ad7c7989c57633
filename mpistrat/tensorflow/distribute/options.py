"""tf.distribute.experimental.CommunicationOptions: what each of its fields means here."""

import logging
from typing import Any

import tensorflow as tf

from ... import basics

logger = logging.getLogger(__name__)


def check_options(options: Any) -> None:
    """Say of options that are given what they cannot have here.

    Raises:
        ValueError: Not CommunicationOptions.
    """
    if options is None:
        return
    if not hasattr(options, "bytes_per_pack"):
        raise ValueError("communication_options must be tf.distribute.experimental.CommunicationOptions. "
                         f"Received: {options!r}")
    nccl = tf.distribute.experimental.CommunicationImplementation.NCCL
    if options.implementation == nccl and not basics.nccl_built() and basics.rank() == 0:
        logger.warning("CommunicationOptions ask for NCCL, which is not there; tensors are reduced over MPI.")
    if options.timeout_seconds is not None and basics.rank() == 0:
        logger.warning("CommunicationOptions' timeout_seconds is not used; set MPISTRAT_STALL_SHUTDOWN_TIME_SECONDS.")
