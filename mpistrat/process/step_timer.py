"""Times the first steps of a script for `mpistrat run --efficiency`, and ends the script after them.

What a step is: a batch of Keras' fit (keras/fit/fit_callbacks.py), or elsewhere one averaging of gradients
(tensorflow/timed_steps.py). All ranks count the same steps, so all of them end at the same one: with SystemExit, as if
the script had called sys.exit(). What it does after training does not run, and its `finally` does.
"""

import atexit
import json
import os
import time
from collections.abc import Callable, MutableMapping
from dataclasses import asdict, dataclass, field

from ..core.slowest import Waits
from . import launch_env, report

# The time begins after so many calls: TensorFlow traces in the first step, and the optimizer makes its variables.
_SKIPPED = 2
LEAST_STEPS = _SKIPPED + 1


@dataclass(frozen=True)
class StepTimes:
    """What one rank has measured."""

    steps: int  # How many were timed; 0 if the script has ended before.
    seconds: float  # What they took.
    rows: int | None  # How many rows of this rank they had; None where nothing counts them.
    is_global: bool  # Whether the script's batches are those of all ranks together, as under MPIStrategy.
    counted: int  # All steps, with those that were not timed.
    waits: Waits = field(default=Waits())  # Its waits for collectives in that time.


class StepTimer:
    """Times the steps of this rank until there were `last`.

    `is_in_fit`: Whether fit counts the steps, so that averagings of gradients do not.
    """

    def __init__(self, last: int, rank: int):
        self.is_in_fit = False
        self._last, self._rank = last, rank
        self._calls = self._steps = self._begun = 0
        self._began, self._rows = 0.0, 0
        self._has_ended = False

    def end_step(self, steps: int, rows: int | None, is_global: bool,
                 waits_between: Callable[[float, float], Waits]) -> None:
        """So many more steps have ended, and this rank has trained on `rows` rows since its start. In any thread.

        `waits_between`: Returns the waits of this rank from a time to another one, as `time.perf_counter` has it.
        """
        self._calls, self._steps = self._calls + 1, self._steps + steps
        now = time.perf_counter()
        if self._calls == _SKIPPED:
            self._began, self._begun, self._rows = now, self._steps, rows or 0
        if self._calls > _SKIPPED and self._steps >= self._last and not self._has_ended:
            self._has_ended = True
            self._tell(StepTimes(self._steps - self._begun, now - self._began,
                                 None if rows is None else rows - self._rows, is_global, self._steps,
                                 waits_between(self._began, now)))

    def end_script(self) -> None:
        """Raises SystemExit if the last step has ended. In the thread that trains, between two steps."""
        if self._has_ended:
            raise SystemExit

    def tell_of_early_end(self) -> None:
        """At the end of the script: say how many steps there were, if they were too few."""
        if not self._has_ended:
            self._tell(StepTimes(0, 0.0, None, False, self._steps))

    def _tell(self, times: StepTimes) -> None:
        report.tell(self._rank, f"{report.MEASURES} {json.dumps(asdict(times))}", os.environ)


_timer: StepTimer | None = None


def current(environ: MutableMapping[str, str] = os.environ) -> StepTimer | None:
    """The timer of this rank; None unless `mpistrat run --efficiency` has started it.

    The variable is removed, because it is not for the programs that this process starts.
    """
    global _timer
    steps = environ.pop(launch_env.RUN_STEPS, None)
    if steps is not None:
        _timer = StepTimer(int(steps), launch_env.launched_rank(environ))
        atexit.register(_timer.tell_of_early_end)
    return _timer
