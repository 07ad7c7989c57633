"""Connects the ranks of one host: sockets between all pairs of them, and an anonymous file of shared memory.

The first rank of the host makes the sockets and the file, and passes their descriptors to the other ranks. Sockets and
file have no names, so other processes cannot open them. Used in init(), by one thread.
"""

from collections.abc import Sequence

from ..core.interruption import Interruption
from .fd_exchange import FdExchange, Invitation, close_all
from .memfd import HostFile
from .unix_socket import ChannelSockets, UnixSocketChannel


class HostLink:
    """One rank's end of the connections. Construct it on all ranks of the host, then call `connect`, then `close`.

    Args:
        local_ranks: The ranks on this host. The first one makes the sockets and the file.
        job_ranks: The ranks of `local_ranks` in the job, for error messages; None: equal to `local_ranks`.
        interruption: Interrupts the wait for the other ranks; None: the wait cannot be interrupted.

    Raises:
        OSError: This rank cannot listen.
    """

    def __init__(self, rank: int, local_ranks: Sequence[int], job_ranks: Sequence[int] | None = None,
                 interruption: Interruption | None = None):
        self._rank, self._ranks = rank, tuple(local_ranks)
        self._job_ranks = dict(zip(local_ranks, job_ranks or local_ranks, strict=True))
        self._exchange = FdExchange(self._job_ranks[rank], list(self._job_ranks.values()), interruption)
        self._file: HostFile | None = None
        self._first = f"rank {self._job_ranks[local_ranks[0]]}"
        self._no_file = OSError(f"{self._first} could not make the file of shared memory")

    @property
    def invitation(self) -> Invitation | None:
        """On the first rank, the argument of `connect` of the other ranks; None elsewhere, and if it is alone."""
        return self._exchange.invitation

    def connect(self, invitation: Invitation | None) -> UnixSocketChannel:
        """Return this rank's channel. Collective within the host.

        Args:
            invitation: From the first rank of the host.

        Raises:
            OSError: The ranks cannot be connected. Only some ranks may raise this error.
        """
        sockets = self._give() if self._rank == self._ranks[0] else self._take(invitation)
        return UnixSocketChannel(self._rank, sockets)

    def _give(self) -> ChannelSockets:
        try:
            self._file = HostFile.make()
        except OSError as error:
            self._no_file = error
        shared = [] if self._file is None else [self._file.fileno()]
        made = ChannelSockets.make(self._ranks)
        try:
            outboxes = [made[self._rank].outboxes[rank].fileno() for rank in self._ranks]
            if len(self._ranks) > 1:
                self._exchange.give({self._job_ranks[rank]: [made[rank].inbox.fileno(), *outboxes, *shared]
                                     for rank in self._ranks[1:]})
        except BaseException:
            made[self._rank].close()
            raise
        finally:
            self._exchange.close()
            # The other ranks have their inboxes now. With a copy open here, a rank's end would not close its inbox.
            for rank in self._ranks[1:]:
                made[rank].inbox.close()
        return made[self._rank]

    def _take(self, invitation: Invitation | None) -> ChannelSockets:
        if invitation is None:
            raise OSError(f"{self._first}, on this host, could not open its listening socket")
        taken = self._exchange.take(invitation)
        count = 1 + len(self._ranks)
        try:
            if len(taken) not in (count, count + 1):
                raise OSError(f"{self._first} gave {len(taken)} descriptors, not {count}, to connect "
                              f"{len(self._ranks)} ranks")
            sockets = ChannelSockets.over(taken[:count], self._ranks)
        except BaseException:
            close_all(taken)
            raise
        if len(taken) > count:
            try:
                self._file = HostFile.over(taken[count])
            except OSError as error:
                self._no_file = error
        return sockets

    def file(self) -> HostFile:
        """Return the file of shared memory, which is open until `close`. Local.

        Raises OSError: This rank has no file. Other ranks may have one.
        """
        if self._file is None:
            raise self._no_file
        return self._file

    def close(self) -> None:
        """Stop listening, and close the file; memory that was mapped stays mapped. May be called twice."""
        self._exchange.close()
        if self._file is not None:
            self._file.close()
