"""Sets of what cannot be hashed, such as variables."""

from collections.abc import Iterable
from typing import Any


class IdentitySet:
    """Objects, compared by identity. It keeps them alive, for the id of an object that is gone is another's next."""

    def __init__(self, members: Iterable[Any] = ()):
        self._members = {id(member): member for member in members}

    def add(self, member: Any) -> None:
        """Put `member` in."""
        self._members[id(member)] = member

    def __contains__(self, candidate: Any) -> bool:
        return id(candidate) in self._members
