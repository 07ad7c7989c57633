"""MPIStrategy and what it is made of."""

from .strategy import MPIStrategy

__all__ = ["MPIStrategy"]
