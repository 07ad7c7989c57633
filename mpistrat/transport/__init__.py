"""Backends for CPU tensors: for one process, for shared memory within a host, for MPI, and for several hosts."""
