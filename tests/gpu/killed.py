"""Kills a rank in the middle of a collective: the other rank must neither wait for ever nor read a wrong number.

    python -m tests.gpu.killed

This is done to two ranks of a plain job, and to two ranks of an elastic job. In the elastic job, the other rank
continues from the last commit. With --stand-in the ranks run without a GPU, staged.
"""

import os
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np

ELEMENTS, STEPS, KILLED_IN = 10**6, 40, 12
LIMIT_S = 20.0  # from the death of the rank on
IS_STAND_IN = "--stand-in" in sys.argv


def rank() -> None:
    """Run one rank's script. It prints WRONG if it reads a wrong number."""
    import mpistrat
    from mpistrat.api.elastic import ObjectState, run
    from mpistrat.gpu.gpu_executor import GpuExecutor
    from tests.gpu.two_ranks import Gpu, StandIn
    mpistrat.init()
    size_before = mpistrat.size()

    def killed(*_: Any) -> None:
        """Kill this rank in place of enqueuing a collective on which the ranks agreed. The other rank enqueues it."""
        time.sleep(1)
        print(f"killed at {time.time():.2f}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    @run
    def train(state: Any) -> None:
        gpu: Gpu = StandIn() if IS_STAND_IN else Gpu()
        while state.step < STEPS:
            given = gpu.array(np.full(ELEMENTS, state.step + 1.0, np.float32))
            if state.step == KILLED_IN and mpistrat.size() > 1 and mpistrat.rank() == mpistrat.size() - 1:
                GpuExecutor._run_bucket = killed  # type: ignore[method-assign, assignment]
            found = gpu.values(mpistrat.allreduce(given, op=mpistrat.Sum, name="step"))
            if not ((found == (state.step + 1.0) * mpistrat.size()) | np.isnan(found)).all():
                print(f"WRONG in step {state.step}: {found.min()} to {found.max()}", flush=True)
            state.total += float(found[0]) / mpistrat.size()
            state.step += 1
            state.commit()

    state = ObjectState(step=0, total=0.0)
    train(state)
    is_right = state.total == STEPS * (STEPS + 1) / 2
    print(f"{'ended right' if is_right else 'WRONG total'} on {mpistrat.size()} of {size_before} ranks at "
          f"{time.time():.2f}", flush=True)


def main() -> int:
    failed = 0
    for options in ([], ["--elastic", "--min-np", "1"]):
        began = time.time()
        environ = {**os.environ, "MPISTRAT_STALL_CHECK_TIME_SECONDS": "5", "MPISTRAT_STALL_SHUTDOWN_TIME_SECONDS": "10",
                   **({"MPISTRAT_GPU_OPERATIONS": "staged"} if IS_STAND_IN else {})}
        command = [sys.executable, "-m", "mpistrat", "run", *options, "-np", "2", "--", sys.executable, "-m",
                   "tests.gpu.killed", "--rank", *(["--stand-in"] if IS_STAND_IN else [])]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
        output, ended = done.stdout + done.stderr, time.time()
        at = next((float(line.rpartition(" ")[2]) for line in output.splitlines() if "killed at " in line), began)
        is_right = "killed at" in output and "WRONG" not in output and ended - at < LIMIT_S and (
            "ended right on 1 of" in output if options else done.returncode != 0)
        print(f"{'elastic' if options else 'plain'}: {'passed' if is_right else 'FAILED'}, code {done.returncode}, "
              f"{ended - at:.1f} s after the rank was killed", flush=True)
        said = [line for line in output.splitlines() if not is_right or " GPU " in line or "event.done" in line]
        print("\n".join(said), flush=True)
        failed += not is_right
    return failed


if __name__ == "__main__":
    if "--rank" in sys.argv:
        rank()
    else:
        sys.exit(bool(main()))
