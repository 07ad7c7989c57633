"""Counts steps of training by the names of the gradients that are reduced. Pure."""

from ..core.request import CollectiveType, Request


class StepCounter:
    """Counts the steps of one rank. A step begins with a gradient, and ends with one whose name it has already.

    So it is a step of the distributed optimizer, of the tape or of the strategy. Two optimizers with names of their own
    that take turns make one step.

    Attributes:
        steps: How many have begun. None as long as no gradient was reduced.
    """

    def __init__(self) -> None:
        self.steps: int | None = None
        self._names: set[tuple[int, str]] = set()

    def add(self, request: Request) -> int | None:
        """The step that a request belongs to, from 0; None before the first one.

        Args:
            request: They come in the order in which they were executed.
        """
        # Gradients are the only reductions that have the user's names of the tensors.
        if request.labels and request.kind is CollectiveType.ALLREDUCE:
            key = request.process_set, request.name
            if self.steps is None or key in self._names:
                self.steps = (self.steps or 0) + 1
                self._names.clear()
            self._names.add(key)
        return None if self.steps is None else self.steps - 1
