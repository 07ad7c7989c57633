"""Backends: the interfaces of collectives.base, over MPI and in one process."""
