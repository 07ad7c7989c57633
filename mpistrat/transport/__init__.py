"""Bytes between the CPUs of ranks: in one process, over MPI, in shared memory, and between hosts."""
