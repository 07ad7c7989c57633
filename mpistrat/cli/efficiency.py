"""`mpistrat run --efficiency N`: run the first N steps of a script on one rank and on all ranks, and compare.

Called by run.py. The two runs are separate jobs, which end after N steps (process/step_timer.py).
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..core.errors import LaunchError
from ..core.slowest import Waits, figure, shares_of
from ..process.launch_env import RUN_STEPS
from ..process.step_timer import LEAST_STEPS, StepTimes
from . import elastic_run
from .arguments import counted
from .inventory import busy_cores
from .mpirun import this_machine
from .supervisor import Outcome


@dataclass(frozen=True)
class Speed:
    """The training speed of a job."""

    steps_per_s: float  # All ranks together make one step.
    rows_per_s: float | None  # The sum over all ranks; None if a rank does not know its number of rows.
    is_global: bool  # Whether the batch of a step is global: the same number of rows for any number of ranks.
    shares: str  # The end of the printed sentence, on the time of the collectives.


def run(options: argparse.Namespace, launched: Callable[[int, Mapping[str, str]], Outcome]) -> int:
    """Run the two jobs, print the result, and return 0, or the exit code of a job that has failed.

    Args:
        options: The options of `mpistrat run`.
        launched: Runs the job, given the number of ranks and additional environment variables.

    Raises:
        LaunchError: The options contradict each other, or a job had too few steps.
    """
    steps, ranks = options.efficiency, options.np
    if steps < LEAST_STEPS:
        raise LaunchError(f"--efficiency {steps}: at least {LEAST_STEPS} steps are needed, because the first two are "
                          "not timed. Write 50 or more, for example: --efficiency 50")
    if ranks is None or ranks < 2:
        raise LaunchError("--efficiency compares one rank with several. Write the number of ranks, for example: -np 2")
    if elastic_run.is_asked_for(options):
        raise LaunchError("--efficiency and --elastic cannot be combined. Leave out one of them.")
    if busy := busy_cores(os.getloadavg()[1], this_machine(os.environ).cores):
        print(f"mpistrat run: on this host {busy}. These processes change both figures (ps aux --sort=-%cpu | head)",
              file=sys.stderr)
    speeds = {}
    for number in (1, ranks):
        print(f"mpistrat run: the first {steps} steps on {counted(number, 'rank')}", file=sys.stderr, flush=True)
        outcome = launched(number, {RUN_STEPS: str(steps)})
        if outcome.code:
            return outcome.code
        speeds[number] = speed_of({rank: StepTimes(**json.loads(text)) for rank, text in outcome.measured.items()},
                                  number, steps)
    print(sentence(speeds[1], speeds[ranks], ranks), flush=True)
    return 0


def speed_of(measured: Mapping[int, StepTimes], ranks: int, wanted: int) -> Speed:
    """Return the speed of a job from the step times of its ranks. Raises LaunchError: A rank has timed no step."""
    times = list(measured.values())
    few = min((each.counted for each in times if not each.steps), default=0 if len(times) < ranks else None)
    if few is not None:
        what = f"{counted(few, 'step')}" if few else "a step that averages gradients"
        remedy = f"Ask for fewer than {few} steps, or train for more epochs." if few >= LEAST_STEPS else \
            "Steps are counted in fit, and where a DistributedOptimizer, a DistributedGradientTape or an optimizer " \
            "under MPIStrategy averages gradients."
        raise LaunchError(f"the script ended {'after' if few else 'without'} {what}, but --efficiency should time "
                          f"{wanted} steps. {remedy}")
    seconds = max(each.seconds for each in times)
    rows = [each.rows for each in times if each.rows is not None]
    return Speed(times[0].steps / seconds, sum(rows) / seconds if len(rows) == len(times) else None,
                 times[0].is_global, shares_of([Waits(*each.waits) for each in times], [f"rank {r}" for r in measured]))


def sentence(one: Speed, all_ranks: Speed, ranks: int) -> str:
    """Return the sentence on the two jobs. Without rows, ranks of a Horovod-style script count a batch each."""
    if one.rows_per_s is not None and all_ranks.rows_per_s is not None:
        times = all_ranks.rows_per_s / one.rows_per_s
        detail = f"{figure(all_ranks.rows_per_s)} rows per second, and {figure(one.rows_per_s)} on one rank"
    else:
        times = all_ranks.steps_per_s / one.steps_per_s * (1 if all_ranks.is_global else ranks)
        assumed = "" if all_ranks.is_global else ", if each rank's batch is as large as that of one rank"
        detail = f"{figure(all_ranks.steps_per_s)} steps per second, and {figure(one.steps_per_s)} on one " \
                 f"rank{assumed}"
    return f"{ranks} ranks train {times:.3g} times as fast as one, an efficiency of {times / ranks:.0%}: {detail}" \
           f"{all_ranks.shares}."
