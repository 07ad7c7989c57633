"""Exchange of arrays between hosts over MPI, as they are or rounded to 8-bit numbers. Used by the engine's thread."""

import itertools
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from ...core.arithmetic import Scale
from ...core.memory import FusionBuffer
from ...core.quantised import BLOCK, Codec, wire_bytes
from ...core.tuning import EAGER_MESSAGE_BYTES, HIERARCHICAL_ALLGATHER_BYTES
from .peer_wait import never_free

_BYTE, _FLOAT = np.dtype(np.uint8), np.dtype(np.float32)


def _pieces(array: np.ndarray) -> list[np.ndarray]:
    """The bytes of a C-contiguous 1-D array, in pieces of at most EAGER_MESSAGE_BYTES."""
    data = array.view(np.uint8)
    return [data[start:start + EAGER_MESSAGE_BYTES] for start in range(0, data.nbytes, EAGER_MESSAGE_BYTES)]


def exchange(comm: MPI.Comm, sent: Sequence[np.ndarray], received: Sequence[np.ndarray]) -> list[MPI.Request]:
    """Start to send `sent[r]` to each other rank r of `comm`, and to receive `received[r]` from rank r.

    The arrays at the index of this rank are not used. Returns the requests to complete.

    MPI announces a large message, and sends its data after a reply. If both sides send all the time, as here, the reply
    waits behind other data in the queue, and the wire is idle. 42 MB over 1 Gbit/s take 506 ms in messages of 2 MiB,
    two in flight. They take 352 ms in eager messages, and as long in a single message.
    """
    size, rank = comm.Get_size(), comm.Get_rank()
    # The others in turn from the next one on, so that not all send to the same one at first.
    others = [(rank + step) % size for step in range(1, size)]
    requests: list[MPI.Request] = []
    try:
        for other in others:
            for piece in _pieces(received[other]):
                requests.append(comm.Irecv([piece, MPI.BYTE], other))
        for other in others:
            for piece in _pieces(sent[other]):
                requests.append(comm.Isend([piece, MPI.BYTE], other))
    except BaseException:  # A rank is lost, and MPI may still use the memory of requests that have begun.
        never_free(requests)
        raise
    return requests


class QuantisedExchange:
    """All-reduces of slices, one after the other, between the ranks of `comm`, one on each host.

    Two hosts, and more hosts for a small slice, send the whole slice to each other. Each host sums the 8-bit numbers of
    all hosts, its own too, in float32 and in host order. Otherwise each host sums one part of the slice, first its own
    unrounded values, and sends the sum as 8-bit numbers, which it also decodes. So all hosts have the same bits.

    Rounding errors stay on the host that rounded: the sender of a part, or the host that summed the part. The sum of
    all hosts' errors is the error of the sum so far.

    `comm` is COMM_NULL on a rank that sends nothing. The objects of one thread may share `codec`.
    """

    def __init__(self, comm: MPI.Comm, codec: Codec):
        self._comm, self._codec = comm, codec
        self._hosts, self._host = (comm.Get_size(), comm.Get_rank()) if comm != MPI.COMM_NULL else (0, 0)
        self._sent, self._received, self._total = FusionBuffer(), FusionBuffer(), FusionBuffer()

    def send(self, values: np.ndarray, errors: np.ndarray | None) -> list[MPI.Request]:
        """Start to send `values`, the host's own, as 8-bit numbers. For `errors` see Codec.encode.

        The caller must not change either array before `combine`. Returns the requests to complete before `combine`.
        """
        self._values, self._errors, count = values, errors, values.size
        nbytes = wire_bytes(count)
        self._is_whole = self._hosts == 2 or nbytes * self._hosts <= HIERARCHICAL_ALLGATHER_BYTES
        if self._is_whole:
            sent = self._sent.view(nbytes, _BYTE)
            self._codec.encode(values, errors, sent)
            self._rows = list(self._received.view(nbytes * self._hosts, _BYTE).reshape(self._hosts, nbytes))
            self._rows[self._host] = sent
            return exchange(self._comm, [sent] * self._hosts, self._rows)
        blocks = -(-count // BLOCK)
        bounds = [min(blocks * h // self._hosts * BLOCK, count) for h in range(self._hosts + 1)]
        self._bounds = [slice(*pair) for pair in itertools.pairwise(bounds)]
        self._sizes = [wire_bytes(part.stop - part.start) for part in self._bounds]
        self._starts = [sum(self._sizes[:h]) for h in range(self._hosts)]
        sent = self._sent.view(sum(self._sizes), _BYTE)
        for h, part in enumerate(self._bounds):
            if h != self._host:
                self._codec.encode(values[part], None if errors is None else errors[part], self._part_of(sent, h))
        own = self._sizes[self._host]
        self._rows = list(self._received.view(own * self._hosts, _BYTE).reshape(self._hosts, own))
        return exchange(self._comm, [self._part_of(sent, h) for h in range(self._hosts)], self._rows)

    def combine(self, result: np.ndarray, scale: Scale) -> list[MPI.Request]:
        """Sum the values of all hosts. Returns the requests to complete before `finish`; [] if `result` is complete."""
        if self._is_whole:
            total = self._sum_of(result)
            for h, row in enumerate(self._rows):
                self._codec.decode(row, total, adds=h > 0)
            scale.apply(total, result)
            return []
        own = self._bounds[self._host]
        total = self._total.view(own.stop - own.start, _FLOAT)
        np.copyto(total, self._values[own], casting="same_kind")
        for h, row in enumerate(self._rows):
            if h != self._host:
                self._codec.decode(row, total, adds=True)
        self._gathered = self._sent.view(sum(self._sizes), _BYTE)
        errors = None if self._errors is None else self._errors[own]
        parts = [self._part_of(self._gathered, h) for h in range(self._hosts)]
        self._codec.encode(total, errors, parts[self._host])
        return exchange(self._comm, [parts[self._host]] * self._hosts, parts)

    def finish(self, result: np.ndarray, scale: Scale) -> None:
        """Write the scaled sum to `result`."""
        if self._is_whole:
            return
        total = self._sum_of(result)
        for h, part in enumerate(self._bounds):
            self._codec.decode(self._part_of(self._gathered, h), total[part])
        scale.apply(total, result)

    def _sum_of(self, result: np.ndarray) -> np.ndarray:
        """The float32 array for the sum: `result` if it has that dtype, else a buffer."""
        return result if result.dtype == _FLOAT else self._total.view(result.size, _FLOAT)

    def _part_of(self, wire: np.ndarray, host: int) -> np.ndarray:
        return wire[self._starts[host]:self._starts[host] + self._sizes[host]]
