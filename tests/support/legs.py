"""Legs of a test: with what settings, and on which hosts, the same is done once more."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pytest

import mpistrat
from mpistrat.api import runtime


@dataclass(frozen=True, eq=False)
class Leg:
    name: str
    settings: Mapping[str, str] = field(default_factory=dict)  # Environment variables, set on all ranks.
    # The host of each of the first ranks, one letter for each; the other ranks are on the last one. "": the ranks are
    # where they are.
    hosts: str = ""

    def host_of(self, size: int) -> tuple[str, ...]:
        return tuple(f"host {letter}" for letter in (self.hosts + self.hosts[-1] * size)[:size])


DEFAULT = Leg("default")
MPI = Leg("mpi", {"MPISTRAT_CPU_OPERATIONS": "mpi"})
# Ranks 0 and 1 share a host, where there are three ranks or more; two ranks are two hosts.
TWO_HOSTS = Leg("two hosts", hosts="AAB")
HOST_EACH = Leg("two hosts", hosts="AB")
# The default backends, with every operation negotiated through rank 0.
NO_VOTES = Leg("no votes", {"MPISTRAT_DISABLE": "fast_path"})


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
