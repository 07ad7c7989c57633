"""All-reduces of slices between hosts over MPI, with 8-bit numbers on the wire.

Used by the engine's thread.
"""

import itertools

import numpy as np
from mpi4py import MPI

from ...core.arithmetic import Scale
from ...core.memory import FusionBuffer
from ...core.quantised import BLOCK, Codec, wire_bytes
from ...core.tuning import MPI_ALLGATHER_BYTES
from .eager import exchange

_BYTE, _FLOAT = np.dtype(np.uint8), np.dtype(np.float32)


class QuantisedExchange:
    """All-reduces of slices, one after the other, between the ranks of `comm`, one on each host.

    Two hosts, and more hosts for a small slice, send the whole slice to each other. Each host sums the 8-bit numbers of
    all hosts, its own too, in float32 and in host order. Otherwise each host sums one part of the slice, first its own
    unrounded values, and sends the sum as 8-bit numbers, which it also decodes. So all hosts have the same bits.

    Rounding errors stay on the host that rounded: the sender of a part, or the host that summed the part. The sum of
    all hosts' errors is the error of the sum so far.

    Args:
        comm: The communicator; COMM_NULL on a rank that sends nothing.
        codec: Encodes and decodes; the objects of one thread may share it.
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
        self._is_whole = self._hosts == 2 or nbytes * self._hosts <= MPI_ALLGATHER_BYTES
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
