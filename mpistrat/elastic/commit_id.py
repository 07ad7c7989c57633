"""Which commit of an elastic job. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class CommitId:
    """Which commit: later ones are greater."""

    generation: int  # The generation that has made it, from 1.
    number: int  # How many commits this generation had made with it.

    def __str__(self) -> str:
        return f"commit {self.number} of generation {self.generation}"
