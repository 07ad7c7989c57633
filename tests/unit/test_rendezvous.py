"""The addresses of ranks, from the connections that they made."""

from mpistrat.cluster.cluster import Link, addresses_of
from mpistrat.core.topology import Topology


def test_ranks_of_one_host_need_no_addresses() -> None:
    links = [Link(), Link("127.0.0.1", "127.0.0.1")]
    assert addresses_of(Topology(1, ("a", "a")), links) == ("a", "a")


def test_a_rank_of_another_host_has_the_address_that_it_came_from() -> None:
    links = [Link(), Link("10.0.0.2", "10.0.0.1"), Link("10.0.0.3", "10.0.0.1")]
    assert addresses_of(Topology(0, ("a", "b", "c")), links) == ("10.0.0.1", "10.0.0.2", "10.0.0.3")


def test_the_chiefs_host_has_the_address_where_others_reached_it() -> None:
    links = [Link(), Link("172.17.0.1", "172.17.0.1"), Link("10.0.0.2", "10.0.0.1")]
    assert addresses_of(Topology(0, ("a", "a", "b")), links) == ("10.0.0.1", "10.0.0.1", "10.0.0.2")
