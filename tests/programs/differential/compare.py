"""Comparison of arrays bit by bit: among the ranks, and with those of another leg. Not by way of what is tested."""

import hashlib
from collections.abc import Mapping

import numpy as np
from mpi4py import MPI

Arrays = Mapping[str, np.ndarray]


def assert_equal_on_all_ranks(arrays: Arrays, where: str) -> None:
    """Raise AssertionError, on all ranks, unless all have the same bits. Collective over MPI's world.

    The text names the first array that differs, and on which ranks.
    """
    comm = MPI.COMM_WORLD
    digests = comm.allgather([(name, *_digest(array)) for name, array in arrays.items()])
    if all(other == digests[0] for other in digests):
        return
    names = [[name for name, *_ in digest] for digest in digests]
    assert all(other == names[0] for other in names), f"{where}: the ranks have other variables: {names}"
    different = [i for i in range(len(names[0])) if len({digest[i] for digest in digests}) > 1]
    first = names[0][different[0]]
    versions = comm.allgather(np.asarray(arrays[first]))
    alike: dict[tuple, list[int]] = {}
    for rank, digest in enumerate(digests):
        alike.setdefault(digest[different[0]], []).append(rank)
    raise AssertionError(
        f"{where}: {len(different)} of {len(names[0])} variables are not the same on all ranks. The first is {first}, "
        f"which is the same within ranks {' and ranks '.join(str(ranks) for ranks in alike.values())}; "
        + "; ".join(f"rank {rank} {_difference(versions[0], version)} from rank 0"
                    for rank, version in enumerate(versions[1:], start=1)))


def assert_equal_in_both(one: Arrays, other: Arrays, where: str) -> None:
    """Raise AssertionError, on all ranks, unless every rank has the same bits in both. Collective over MPI's world."""
    comm, problem = MPI.COMM_WORLD, ""
    if list(one) != list(other):
        problem = f"the variables are {list(one)} and {list(other)}"
    else:
        different = [name for name in one if _digest(one[name]) != _digest(other[name])]
        if different:
            first = different[0]
            problem = (f"{len(different)} of {len(one)} variables are not the same. The first is {first}, which "
                       f"{_difference(np.asarray(one[first]), np.asarray(other[first]))}")
    problems = {rank: text for rank, text in enumerate(comm.allgather(problem)) if text}
    assert not problems, f"{where}: " + "; ".join(f"rank {rank}: {text}" for rank, text in problems.items())


def assert_near_in_both(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray], tolerances: Mapping[str, float],
                        where: str) -> None:
    """Raise AssertionError, on all ranks, if an array of some rank differs by more than its tolerance. Collective.

    Args:
        tolerances: Of each name: how large the Euclidean norm of the difference may be, as a part of that of `one`.
    """
    problems = [f"{name} differs by {distance:.2g}, and may by {limit:.2g}" for name, limit in tolerances.items()
                if not (distance := np.linalg.norm(one[name] - other[name]) / np.linalg.norm(one[name])) <= limit]
    everywhere = {rank: text for rank, text in enumerate(MPI.COMM_WORLD.allgather("; ".join(problems))) if text}
    assert not everywhere, f"{where}: " + "; ".join(f"rank {rank}: {text}" for rank, text in everywhere.items())


def _digest(array: np.ndarray) -> tuple[str, tuple[int, ...], str]:
    array = np.asarray(array)
    return array.dtype.name, array.shape, hashlib.sha256(array.tobytes()).hexdigest()


def _difference(one: np.ndarray, other: np.ndarray) -> str:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return f"is {one.dtype.name}{one.shape} and differs as {other.dtype.name}{other.shape}"
    bits_one, bits_other = (np.frombuffer(a.tobytes(), np.uint8).reshape(a.size, -1) for a in (one, other))
    count = int((bits_one != bits_other).any(axis=1).sum())
    with np.errstate(all="ignore"):
        most = np.max(np.abs(one.astype(np.float64) - other.astype(np.float64)), initial=0.0)
    return f"differs in {count} of {one.size} elements, by {most:.3g} at most,"
