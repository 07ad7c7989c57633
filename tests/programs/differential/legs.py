"""The legs: with what settings, and on which hosts, a program is trained."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pytest

import mpistrat
from mpistrat.api import runtime
from mpistrat.tensorflow.xla import ffi


@dataclass(frozen=True, eq=False)
class Leg:
    """Settings to train with."""

    name: str
    settings: Mapping[str, str] = field(default_factory=dict)  # Environment variables, set on all ranks.
    # The host of each of the first ranks, one letter for each; the other ranks are on the last one. "": the ranks are
    # where they are.
    hosts: str = ""
    is_compiled: bool = False  # Whether XLA compiles the training step, with its collectives.
    # Whether the training is made under MPIStrategy instead of Horovod's way, or the reverse.
    is_other_door: bool = False
    is_sharded: bool = False  # Whether the optimizer's state is divided among the ranks.

    def host_of(self, size: int) -> tuple[str, ...]:
        """The host of each of `size` ranks."""
        return tuple(f"host {letter}" for letter in (self.hosts + self.hosts[-1] * size)[:size])

    def sums_like_mpi(self, size: int, in_halves: bool) -> bool:
        """Whether sums over `size` ranks have the bits of MPI's, which are of all ranks from left to right.

        Over hosts they are sums of hosts' sums; and of half precision, each host rounds its own.
        """
        hosts = self.host_of(size) if self.hosts else ("one",) * size
        has_sums_of_sums = any(hosts.count(host) > 1 for host in set(hosts) - {hosts[0]})
        is_rounded_twice = in_halves and 1 < len(set(hosts)) < size
        return not has_sums_of_sums and not is_rounded_twice


DEFAULT = Leg("default")
MPI = Leg("mpi", {"MPISTRAT_CPU_OPERATIONS": "mpi"})
# Ranks 0 and 1 share a host, where there are three ranks or more; two ranks are two hosts.
TWO_HOSTS = Leg("two hosts", hosts="AAB")
HOST_EACH = Leg("two hosts", hosts="AB")
# The default backends, with every operation negotiated through rank 0.
NO_VOTES = Leg("no votes", {"MPISTRAT_DISABLE": "fast_path"})
OTHER_DOOR = Leg("other door", is_other_door=True)
SHARDED = Leg("sharded", is_sharded=True)
COMPILED = Leg("compiled", is_compiled=True)
COMPILED_MPI = Leg("compiled, mpi", MPI.settings, is_compiled=True)


def legs_for(size: int, with_xla: bool, with_other_door: bool, with_sharding: bool) -> list[Leg]:
    """All legs of a program on `size` ranks, with those of XLA where TensorFlow has what they need."""
    compiled = [COMPILED, COMPILED_MPI] if with_xla and ffi.api() is not None else []
    return [DEFAULT, MPI, TWO_HOSTS if size > 2 else HOST_EACH, NO_VOTES,
            *([OTHER_DOOR] if with_other_door else []), *([SHARDED] if with_sharding else []), *compiled]


@contextlib.contextmanager
def under(leg: Leg) -> Iterator[None]:
    """Have mpistrat initialised for `leg` meanwhile, and shut down afterwards. Collective.

    Hosts are made up where init() has heard the ranks' host names; what it makes of them is the product's own.
    """
    mpistrat.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        if leg.hosts:  # They share the cores of one host, and a share that a rank has taken stays with it.
            patch.setenv("MPISTRAT_BIND", "gpu")
        for name, value in leg.settings.items():
            patch.setenv(name, value)
        if leg.hosts:
            patch.setattr(runtime, "unique_hosts", lambda names, groups: leg.host_of(len(names)))
        mpistrat.init()
        assert not leg.hosts or set(mpistrat.hosts()) == set(leg.host_of(mpistrat.size())), mpistrat.hosts()
        assert "MPISTRAT_CPU_OPERATIONS" not in leg.settings or \
            runtime.current().data_name == leg.settings["MPISTRAT_CPU_OPERATIONS"], runtime.current().data_name
        assert leg is not NO_VOTES or runtime.current().world.engine.controller._fast_path._agreement is None
        yield
        mpistrat.shutdown()
