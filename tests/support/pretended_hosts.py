"""Make the ranks of one machine form several hosts, so that tests of what goes on between hosts need no network."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from mpistrat.api import runtime


def pretend_hosts(ranks_per_host: int) -> None:
    """Let each `ranks_per_host` consecutive ranks be a host of their own from the next init() on. On all ranks."""
    exchange_info = runtime.exchange_info

    def introduce_hosts(mpi: Any, comm: Any, hosts: Sequence[str] = ()) -> list[runtime.RankInfo]:
        return [dataclasses.replace(told, host=f"host{rank // ranks_per_host}",
                                    memory_group=rank - rank % ranks_per_host)
                for rank, told in enumerate(exchange_info(mpi, comm, hosts))]

    runtime.exchange_info = introduce_hosts
