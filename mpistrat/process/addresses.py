"""The addresses of this host, by which processes on other hosts reach it."""

import contextlib
import fcntl
import socket
import struct
from collections.abc import Iterable

_SIOCGIFADDR = 0x8915  # from linux/sockios.h: the IPv4 address of an interface


def local_addresses() -> tuple[str, ...]:
    """The IPv4 addresses of this host's interfaces, in the order of the interfaces, without the loopback's."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # The interface is down, or has no IPv4 address.
                reply = fcntl.ioctl(any_socket, _SIOCGIFADDR, request)
                found.append(socket.inet_ntoa(reply[20:24]))
    return tuple(address for address in found if not address.startswith("127."))


def elsewhere(addresses: Iterable[str]) -> list[str]:
    """Return the `addresses` of another host without the addresses that this host has too.

    An address of both hosts, usually of a container bridge, leads back to this host.
    """
    own = local_addresses()
    return [address for address in addresses if address not in own]
