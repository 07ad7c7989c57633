"""IdentitySet: a set of objects that cannot be hashed, such as variables. For one thread at a time."""

from collections.abc import Iterable


class IdentitySet:
    """A set that compares objects by identity. It keeps them alive: the id of a deleted object may be reused."""

    def __init__(self, members: Iterable[object] = ()):
        self._members = {id(member): member for member in members}

    def add(self, member: object) -> None:
        """Add `member`."""
        self._members[id(member)] = member

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, candidate: object) -> bool:
        return id(candidate) in self._members
