"""ElasticSampler: the rows of a dataset that this rank still has to process in the epoch. Horovod's name and methods.

For users; local, except `sync`.
"""

import math
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any

import numpy as np

from .. import array_ops, runtime


class ElasticSampler:
    """Distributes the indices of rows that no rank has processed in this epoch. All ranks get equally many indices.

        sampler = hvd.elastic.ElasticSampler(x)
        state = hvd.elastic.TensorFlowKerasState(model, sampler=sampler)
        for number, rows in enumerate(batched(sampler, 32)):
            train_step(x[rows], y[rows])
            sampler.record_batch(number, 32)
            state.commit()

    A sampler that is an attribute of a state is saved, restored and synchronised with the state: `sync` exchanges the
    indices of processed rows, and distributes the remaining rows. So a job that resumes from a commit repeats no row.

    Args:
        dataset: Any object with a length.
        shuffle: Whether the order of the rows is random. Each epoch has a different order.
        seed: The seed of the random order, the same on all ranks.

    Attributes:
        epoch: The number of the epoch.
        processed_indices: The indices of the rows that are processed, as far as this rank knows.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0):
        self._count, self._shuffle, self._seed = len(dataset), shuffle, seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, in which no row is processed yet. Local; all ranks must pass the same epoch."""
        self.epoch = epoch
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that this rank has processed its batch `batch_idx`, with `batch_size` rows in each batch. Local."""
        self.record_indices(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices: Iterable[int]) -> None:
        """Note that these rows are processed. Local."""
        self.processed_indices.update(indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return the indices of the rows in batch `batch_idx` of this rank. Local."""
        return self._indices[batch_idx * batch_size:(batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the indices of the processed rows. Local."""
        return {"epoch": self.epoch, "processed_indices": set(self.processed_indices)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a result of state_dict(), and distribute the remaining rows. Local."""
        self.epoch, self.processed_indices = state_dict["epoch"], set(state_dict["processed_indices"])
        self.reset()

    def sync(self, root_rank: int = 0) -> None:
        """Use the epoch of root_rank, and the rows that any rank has processed in that epoch. Collective."""
        states = array_ops.allgather_object(self.state_dict(), name="elastic.sampler")
        self.load_state_dict(self.together([states[root_rank], *states]))

    @staticmethod
    def together(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the epoch of `states[0]`, with the rows that are processed in any of the states of that epoch."""
        epoch = states[0]["epoch"]
        done = [state["processed_indices"] for state in states if state["epoch"] == epoch]
        return {"epoch": epoch, "processed_indices": set().union(*done)}

    def reset(self) -> None:
        """Distribute the rows that are not processed among the current ranks. Local.

        All ranks get the same number of rows. If the rows do not divide evenly, some ranks repeat the first rows.
        """
        rank, size = (runtime.current().topology.rank, runtime.current().topology.size) \
            if runtime.is_initialized() else (0, 1)
        order = np.random.default_rng([self._seed, self.epoch]).permutation(self._count) if self._shuffle \
            else np.arange(self._count)
        remaining = [index for index in order.tolist() if index not in self.processed_indices]
        each = math.ceil(len(remaining) / size)
        self._indices = [remaining[i % len(remaining)] for i in range(rank, each * size, size)]

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)

    def __len__(self) -> int:
        """The number of rows of this rank."""
        return len(self._indices)
