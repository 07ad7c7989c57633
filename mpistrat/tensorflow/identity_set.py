"""IdentitySet: a set of objects that cannot be hashed, such as variables. For one thread at a time."""

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class IdentitySet(Generic[T]):
    """A set that compares objects by identity, in the order in which they were added.

    The set keeps its members alive, since the id of a deleted object may be reused.
    """

    def __init__(self, members: Iterable[T] = ()):
        self._members = {id(member): member for member in members}

    def add(self, member: T) -> None:
        self._members[id(member)] = member

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[T]:
        return iter(self._members.values())

    def __contains__(self, candidate: object) -> bool:
        return id(candidate) in self._members
