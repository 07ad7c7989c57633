"""Backends for host memory: within a process, over MPI, in shared memory, and both between hosts of several ranks."""
