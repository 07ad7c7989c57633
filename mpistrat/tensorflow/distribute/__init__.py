"""MPIStrategy and its parts: tf.distribute with one replica per rank."""

from .strategy import MPIStrategy

__all__ = ["MPIStrategy"]
