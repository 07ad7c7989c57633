"""Times the first steps of a script for `mpistrat run --efficiency`, and ends the script after them.

A step is a batch in Keras' fit (keras/fit/fit_callbacks.py), and elsewhere one averaging of gradients
(tensorflow/gradients.py). All ranks count the same steps, so all ranks end at the same step, with SystemExit, as if
the script had called sys.exit(). Code after the training does not run, except `finally` blocks.
"""

import atexit
import json
import os
import time
from collections.abc import Callable, MutableMapping
from dataclasses import asdict, dataclass, field

from ..core.slowest import Waits
from . import launch_env, report

# The calls before the timing begins: in the first step TensorFlow traces, and the optimizer makes its variables.
_SKIPPED = 2
LEAST_STEPS = _SKIPPED + 1


@dataclass(frozen=True)
class StepTimes:
    """The measurements of one rank."""

    steps: int  # The number of timed steps; 0 if the script has ended before them.
    seconds: float  # The duration of the timed steps.
    rows: int | None  # The rows of this rank in the timed steps; None if rows are not counted.
    is_global: bool  # Whether the script's batches are those of all ranks together, as under MPIStrategy.
    counted: int  # The number of all steps, including the steps that were not timed.
    waits: Waits = field(default=Waits())  # for collectives during the timed steps


class StepTimer:
    """Times the steps of this rank until step number `last` has ended."""

    def __init__(self, last: int, rank: int):
        self.is_in_fit = False  # Whether fit counts the steps. Then averagings of gradients do not count as steps.
        self._last, self._rank = last, rank
        self._calls = self._steps = self._begun = 0
        self._began, self._rows = 0.0, 0
        self._has_ended = False

    def end_step(self, steps: int, rows: int | None, is_global: bool,
                 waits_between: Callable[[float, float], Waits]) -> None:
        """Count `steps` more steps. Any thread may call this. `rows`: The rows of this rank so far; None: not counted.

        `is_global`: Whether a batch is of all ranks. `waits_between`: Returns waits between two perf_counter times.
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
        """Raise SystemExit if the last step has ended. To be called in the training thread, between two steps."""
        if self._has_ended:
            raise SystemExit

    def tell_of_early_end(self) -> None:
        """At the end of the script, report the number of steps if step `last` was not reached."""
        if not self._has_ended:
            self._tell(StepTimes(0, 0.0, None, False, self._steps))

    def _tell(self, times: StepTimes) -> None:
        report.tell(self._rank, f"{report.MEASURES} {json.dumps(asdict(times))}", os.environ)


_timer: StepTimer | None = None


def current(environ: MutableMapping[str, str] = os.environ) -> StepTimer | None:
    """Return the timer of this rank; None unless `mpistrat run --efficiency` has started this rank."""
    global _timer
    steps = environ.pop(launch_env.RUN_STEPS, None)  # Programs that this process starts must not inherit it.
    if steps is not None:
        _timer = StepTimer(int(steps), launch_env.launched_rank(environ))
        atexit.register(_timer.tell_of_early_end)
    return _timer
