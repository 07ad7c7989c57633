"""Collectives and agreement rounds among several hosts: shared memory within a host, MPI between hosts."""
