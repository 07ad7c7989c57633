"""Backends of a job of one rank, without MPI."""

from collections.abc import Sequence

import numpy as np

from ..core.arithmetic import Reduction, combine, pack, unpack
from ..core.interfaces import AgreementRound, ControlPlane, DataPlane, Outcome
from ..core.memory import FusionBuffer
from ..core.signal_handlers import WakeUp


class LocalControl(ControlPlane):
    """The control plane of a single rank, which neither sends nor receives messages."""

    def __init__(self) -> None:
        self._wake_up = WakeUp()

    def send(self, rank: int, message: bytes) -> None:
        raise AssertionError("there is no other rank")

    def flush(self, ranks: Sequence[int], limit_s: float | None = None) -> None:
        """Do nothing: there are no messages."""

    def is_sending_to(self, ranks: Sequence[int]) -> bool:
        return False

    def poll(self) -> list[tuple[int, bytes]]:
        return []

    def wait(self, timeout_s: float, spin_s: float = 0.0, quiet_s: float = 0.0) -> None:
        self._wake_up.wait(timeout_s)

    def wake(self) -> None:
        self._wake_up.set()

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


class LocalAgreement(AgreementRound):
    """The votes of a single rank, which agrees with itself at once."""

    _outcome: Outcome | None = None

    def vote(self, number: int, is_ready: bool = False) -> None:
        self._outcome = (Outcome.ALL_READY if is_ready else Outcome.AGREED) if number else Outcome.REFUSED

    def outcome(self) -> Outcome | None:
        outcome, self._outcome = self._outcome, None
        return outcome

    def has_news(self) -> bool:
        return self._outcome is not None

    def missing(self) -> list[int]:
        return []


class LocalData(DataPlane):
    """Collectives of a single rank. The results are copies of its own arrays, scaled in reductions."""

    name = "local"

    def __init__(self) -> None:
        self._buffer = FusionBuffer()

    def allreduce(self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], reduction: Reduction) -> None:
        packed = self._buffer.view(sum(source.size for source in sources), sources[0].dtype)
        pack(sources, packed, reduction.prescale)
        combine([packed], reduction.op, packed, reduction.scale)
        unpack(packed, targets)

    def allgather(self, source: np.ndarray, target: np.ndarray, counts: Sequence[int]) -> None:
        np.copyto(target, source)

    def alltoall(self, source: np.ndarray, target: np.ndarray, sent: Sequence[int], received: Sequence[int],
                 largest: int) -> None:
        np.copyto(target, source[:target.size])  # The splits may leave rows at the end out.

    def reducescatter(self, source: np.ndarray, target: np.ndarray, counts: Sequence[int],
                      reduction: Reduction) -> None:
        self.allreduce([source], [target], reduction)

    def broadcast(self, array: np.ndarray, root_rank: int) -> None:
        """Do nothing: the only rank is the root."""

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
