"""Planes over MPI, and their waits, with each rank on a host of its own."""

from mpi4py import MPI

from mpistrat.core.topology import Topology
from mpistrat.transport.mpi.mpi_data import MpiData
from mpistrat.transport.mpi.requests import PeerWait


def hosts_of_one_rank() -> Topology:
    return Topology(MPI.COMM_WORLD.Get_rank(), tuple(f"host{r}" for r in range(MPI.COMM_WORLD.Get_size())))


def waits(limit_s: float = 60.0) -> PeerWait:
    """Those of this rank for all others."""
    return PeerWait(hosts_of_one_rank(), range(MPI.COMM_WORLD.Get_size()), limit_s)


def over_mpi(limit_s: float = 60.0) -> MpiData:
    """The plane over MPI of all ranks, with a communicator of its own."""
    return MpiData(MPI.COMM_WORLD.Dup(), waits(limit_s))
