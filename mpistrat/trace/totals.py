"""The totals of a rank over the whole job (steps and times), and the line that rank 0 prints at the end. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..core.request import CollectiveType, Request
from ..core.slowest import Waits, figure, shares_of, total

# A job with less than either gets no line.
_LEAST_S, _LEAST_OPERATIONS = 5.0, 20


def is_of_gradients(request: Request) -> bool:
    """Whether a request reduces gradients. Of all reductions, only those of gradients have labels (variable names)."""
    return bool(request.labels) and request.kind is CollectiveType.ALLREDUCE


class StepCounter:
    """Counts the steps of one rank. A new step begins when the name of a gradient occurs for the second time.

    A step is a step of the distributed optimizer, of the tape or of the strategy. Two optimizers that take turns, with
    different names of gradients, make one step together.
    """

    def __init__(self) -> None:
        self.steps = 0  # How many have begun.
        self._names: set[tuple[int, str]] = set()

    def add(self, request: Request) -> int:
        """The step that a request belongs to, from 0; NO_STEP before the first step.

        `request`: The next request, in the order of execution.
        """
        if is_of_gradients(request):
            key = request.process_set, request.name
            if self.steps == 0 or key in self._names:
                self.steps += 1
                self._names.clear()
            self._names.add(key)
        return self.steps - 1


@dataclass
class Totals:
    """The sums of a rank over the intervals with collectives, except the first interval, in which the rank starts."""

    waits: Waits = field(default=Waits())  # The waits in these intervals.
    steps: int = 0  # Steps of training in these intervals; 0 if steps are not counted.
    operations: int = 0  # Collectives in these intervals.

    def __post_init__(self) -> None:
        self._before: tuple[int, int] | None = None

    def add(self, waits: Waits, steps: int, operations: int) -> None:
        """Add an interval. `steps` and `operations` are the counts from the start of the job to its end."""
        before, self._before = self._before, (steps, operations)
        if before is None:
            self._before = self._before if operations else None
        elif operations > before[1]:
            self.waits = total([self.waits, waits])
            self.steps += steps - before[0]
            self.operations += operations - before[1]


def line_of(totals: Mapping[int, Totals], names: Mapping[int, str]) -> str:
    """The line on a job, from the totals and the names of all its ranks; "" for one rank or a very short job."""
    ranks = sorted(totals)
    shortest = min((each.waits.seconds for each in totals.values()), default=0.0)
    fewest = min((each.operations for each in totals.values()), default=0)
    if len(ranks) < 2 or shortest < _LEAST_S or fewest < _LEAST_OPERATIONS:
        return ""
    longest = max(each.waits.seconds for each in totals.values())
    steps = max(each.steps for each in totals.values())
    done, unit = (steps, "steps") if steps else (max(each.operations for each in totals.values()), "collectives")
    shares = shares_of([totals[rank].waits for rank in ranks], [names[rank] for rank in ranks])
    return f"mpistrat: {len(ranks)} ranks have done {figure(done / longest)} {unit} per second{shares}."
