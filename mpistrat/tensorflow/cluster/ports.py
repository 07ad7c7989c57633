"""A TCP port that is reserved until its server starts.

Called where a server of TensorFlow or of a data service starts; local.
"""

import socket


class ReservedPort:
    """A TCP port of this host that no other program gets, and that a server in this process can bind at any time.

    The port is bound with SO_REUSEPORT and does not listen. The kernel never assigns a bound port to a program that
    requests any free port, neither to listen nor to connect from. It rejects a request for this number, except from the
    same user with SO_REUSEPORT. The server makes such a request, while the port is still reserved, so the port is never
    free in between. All connections go to the server, because this socket does not listen.

    Raises:
        OSError: There is no free port.
    """

    def __init__(self) -> None:
        # gRPC's servers listen on all addresses: with one socket for IPv6 and IPv4 if the host has both.
        both = socket.has_dualstack_ipv6()
        self._socket = socket.socket(socket.AF_INET6 if both else socket.AF_INET)
        try:
            if both:
                self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self._socket.bind(("", 0))
        except OSError:
            self._socket.close()
            raise
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Release the port. A server that has bound it keeps it. May be called twice."""
        self._socket.close()
