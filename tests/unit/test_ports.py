"""Ports that are held, the addresses of this host, and those of ranks, from the connections that they made."""

import errno
import socket

import pytest

from mpistrat.cluster import Link, ReservedPort, addresses_of
from mpistrat.core.topology import Topology
from mpistrat.process.peers import local_addresses


@pytest.fixture
def held() -> ReservedPort:
    return ReservedPort()


def bind(port: int, reuse_port: bool) -> socket.socket:
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(reuse_port))
    server.bind(("", port))
    return server


def test_a_server_that_shares_it_takes_the_port_while_it_is_held(held: ReservedPort) -> None:
    with pytest.raises(ConnectionRefusedError):  # Nothing listens until then.
        socket.create_connection(("127.0.0.1", held.number), 1)
    with bind(held.number, reuse_port=True) as server:
        server.listen()
        with socket.create_connection(("127.0.0.1", held.number), 1):
            server.settimeout(1)
            server.accept()[0].close()


def test_held_ports_are_all_different() -> None:
    held = [ReservedPort() for _ in range(100)]
    assert len({port.number for port in held}) == 100


def test_another_program_cannot_take_the_port_until_it_is_closed(held: ReservedPort) -> None:
    with pytest.raises(OSError) as caught:
        bind(held.number, reuse_port=False)
    assert caught.value.errno == errno.EADDRINUSE
    held.close()
    held.close()
    bind(held.number, reuse_port=False).close()


def test_the_addresses_of_this_host_are_its_own_and_not_the_loopback() -> None:
    for address in local_addresses():
        assert not address.startswith("127.")
        with socket.create_server((address, 0)) as server, socket.create_connection(server.getsockname(), 1):
            pass


@pytest.mark.parametrize(("hosts", "links", "addresses"), [
    ("aa", [Link(), Link("127.0.0.1", "127.0.0.1")], ("a", "a")),
    ("abc", [Link(), Link("10.0.0.2", "10.0.0.1"), Link("10.0.0.3", "10.0.0.1")], ("10.0.0.1", "10.0.0.2", "10.0.0.3")),
    ("aab", [Link(), Link("172.17.0.1", "172.17.0.1"), Link("10.0.0.2", "10.0.0.1")],
     ("10.0.0.1", "10.0.0.1", "10.0.0.2"))], ids=["one host", "several", "several ranks of the chief's host"])
def test_ranks_of_several_hosts_have_the_addresses_of_their_connections(
        hosts: str, links: list[Link], addresses: tuple[str, ...]) -> None:
    assert addresses_of(Topology(0, tuple(hosts)), links) == addresses
