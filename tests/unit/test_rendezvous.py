"""The addresses of ranks, from the connections that they made."""

import pytest

from mpistrat.cluster import Link, addresses_of
from mpistrat.core.topology import Topology


@pytest.mark.parametrize(("hosts", "links", "addresses"), [
    ("aa", [Link(), Link("127.0.0.1", "127.0.0.1")], ("a", "a")),
    ("abc", [Link(), Link("10.0.0.2", "10.0.0.1"), Link("10.0.0.3", "10.0.0.1")], ("10.0.0.1", "10.0.0.2", "10.0.0.3")),
    ("aab", [Link(), Link("172.17.0.1", "172.17.0.1"), Link("10.0.0.2", "10.0.0.1")],
     ("10.0.0.1", "10.0.0.1", "10.0.0.2"))], ids=["one host", "several", "several ranks of the chief's host"])
def test_ranks_of_several_hosts_have_the_addresses_of_their_connections(
        hosts: str, links: list[Link], addresses: tuple[str, ...]) -> None:
    assert addresses_of(Topology(0, tuple(hosts)), links) == addresses
