"""The id of a commit of an elastic job. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class CommitId:
    """The id of a commit. Later commits have greater ids."""

    generation: int  # The generation that made the commit, from 1.
    number: int  # The number of the commit in its generation, from 1.

    def __str__(self) -> str:
        return f"commit {self.number} of generation {self.generation}"
