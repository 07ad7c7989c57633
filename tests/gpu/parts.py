"""The parts of `python -m tests.gpu`: the command of each, its time limit, and the reason to skip it."""

import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpistrat.cli.mpirun import find_mpirun
from mpistrat.core.errors import LaunchError

from .cupti import find_cupti

ROOT = Path(__file__).parents[2]
# NCCL lets ranks share a GPU from 2.30 on, if the first one is set. An older one ignores it, and tensors are staged.
# Kernels of two ranks that do not fit on a GPU beside each other would hang, so each takes few multiprocessors.
# TensorFlow otherwise takes all memory of the GPU, before the other rank and cupy get any.
SURROUNDINGS = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "8", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
PROBE_LIMIT_S = 30.0
GRACE_S = 5.0

# Prints what cupy finds; every failure is in words, since it is the reason of what is skipped.
_PROBE = """
import json
found = {"gpus": 0, "nccl": 0, "cupy": ""}
try:
    from mpistrat.api.tensors import why_no_cupy
    reason = why_no_cupy()
    found["cupy"] = reason and f"no cupy: {reason}"
    if not reason:
        from mpistrat.gpu.device import Device, gpu_count
        found["gpus"], found["nccl"] = gpu_count(), Device.nccl_version()
except Exception as error:
    found["cupy"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
print("found " + json.dumps(found))
"""
_TENSORFLOW_PROBE = "import tensorflow as tf; print('found', len(tf.config.list_physical_devices('GPU')))"


@dataclass(frozen=True)
class Machine:
    """What a machine has for the parts. A field is "" if the machine has it, and otherwise the reason why not."""

    gpu: str = ""  # A GPU, with cupy.
    nccl: str = ""  # NCCL, through cupy.
    mpi: str = ""  # mpi4py and an mpirun.
    pytest: str = ""  # pytest, with ml_dtypes.
    tensorflow: str = ""  # TensorFlow that sees a GPU.
    sanitizer: str = ""  # compute-sanitizer.
    cupti: str = ""  # CUPTI, which counts calls of CUDA.
    torch: str = ""  # torch.


@dataclass(frozen=True)
class Part:
    """A program, its time limit in seconds, and what it needs (attributes of Machine)."""

    name: str
    command: Sequence[str]
    limit_s: float
    needs: Sequence[str] = ("gpu",)
    is_must: bool = False  # Whether it is one of those that decide whether the path may be trusted.

    def why_skipped(self, machine: Machine) -> str:
        """Return the first reason not to run this part; "" to run it."""
        return next((reason for need in self.needs if (reason := getattr(machine, need))), "")


@dataclass(frozen=True)
class Outcome:
    """How a part ended. `text`: "passed", "skipped: ..." or "FAILED ..."."""

    part: Part
    text: str
    seconds: float = 0.0

    @property
    def has_run(self) -> bool:
        return not self.text.startswith("skipped")

    @property
    def has_failed(self) -> bool:
        return self.text.startswith("FAILED")


_PYTHON = sys.executable
_RANKS = (_PYTHON, "-m", "mpistrat", "run", "-np", "2", "--", _PYTHON)
_PYTEST = ("-m", "pytest", "-q", "-rs", "--color=no", "-p", "no:cacheprovider")

_TENSORFLOW_CHECKS = ("-m", "tests.gpu.tensorflow_checks")

# What must be known comes first, within five minutes: what no stand-in can show. The rest may follow. On an H200 most
# took 4 to 36 s each, of which TensorFlow's start on two ranks was 12.
PARTS = (
    Part("controls", (_PYTHON, *_TENSORFLOW_CHECKS, "controls"), 30, ("gpu", "tensorflow"), True),
    Part("overlap", (_PYTHON, "-m", "tests.gpu.overlap"), 90, ("gpu", "nccl", "tensorflow"), True),
    Part("compiled, one rank", (_PYTHON, "-m", "tests.gpu.compiled"), 40, ("gpu", "nccl", "tensorflow"), True),
    Part("a killed rank", (_PYTHON, "-m", "tests.gpu.killed"), 40, ("gpu", "mpi"), True),
    Part("TensorFlow, one rank", (_PYTHON, *_TENSORFLOW_CHECKS), 45, ("gpu", "tensorflow"), True),
    Part("two ranks", (*_RANKS, "-m", "tests.gpu.two_ranks"), 20, ("gpu", "mpi"), True),
    Part("copy kernel", (_PYTHON, "-m", "tests.gpu.kernel"), 15, is_must=True),
    Part("NCCL on one rank", (_PYTHON, "-m", "tests.gpu.one_rank"), 20, ("gpu", "nccl"), True),
    Part("TensorFlow, two ranks", (*_RANKS, *_TENSORFLOW_CHECKS), 75, ("gpu", "mpi", "tensorflow")),
    Part("compiled, two ranks", (*_RANKS, "-m", "tests.gpu.compiled"), 50, ("gpu", "mpi", "tensorflow")),
    Part("torch", (_PYTHON, "-m", "tests.gpu.with_torch"), 15, ("gpu", "nccl", "torch")),
    Part("price, one rank", (_PYTHON, "-m", "tests.gpu.price"), 130, ("gpu", "nccl", "tensorflow")),
    Part("calls per step", (_PYTHON, "-m", "tests.gpu.calls"), 15, ("gpu", "nccl", "cupti")),
    Part("calls per step, TensorFlow", (_PYTHON, "-m", "tests.gpu.calls", "tensorflow", "tensorflow-alone"), 50,
         ("gpu", "nccl", "cupti", "tensorflow")),
    Part("figures, one rank", (_PYTHON, "-m", "tests.gpu.figures"), 20, ("gpu", "nccl", "mpi")),
    Part("figures, two ranks", (*_RANKS, "-m", "tests.gpu.figures"), 25, ("gpu", "mpi")),
    Part("tests of arrays, two ranks",
         (*_RANKS, *_PYTEST, "-k", "not stand-in", "tests/unit/test_gpu_device.py", "tests/unit/test_gpu_copy.py",
          "tests/parallel/test_gpu_arrays.py", "tests/parallel/test_foreign_tensors.py"), 70, ("gpu", "mpi", "pytest")),
    Part("tests of TensorFlow, two ranks",
         (*_RANKS, *_PYTEST, "-k", "not stand-in", "tests/parallel/test_gpu_tensorflow.py"), 90,
         ("gpu", "mpi", "pytest", "tensorflow")),
    Part("copy kernel under compute-sanitizer",
         ("compute-sanitizer", "--error-exitcode", "9", _PYTHON, "-m", "tests.gpu.kernel", "--few"), 20,
         ("gpu", "sanitizer")),
)


def look_at_machine(environ: Mapping[str, str] = os.environ) -> Machine:
    """Find out what this machine has. Separate processes import the libraries, because these may crash or hang."""
    found = _answer(_PROBE, environ)
    if isinstance(found, str):
        gpu = f"cupy cannot be looked at: {found}"
    else:
        gpu = found["cupy"] or ("" if found["gpus"] else "no GPU is visible")
    nccl = "" if not isinstance(found, str) and found["nccl"] else "cupy has no NCCL"
    tensorflow = _lacking("tensorflow")
    if not gpu and not tensorflow:
        seen = _answer(_TENSORFLOW_PROBE, environ)
        tensorflow = "" if isinstance(seen, int) and seen else f"TensorFlow sees no GPU ({seen})"
    mpi = _lacking("mpi4py") or _why_no_mpirun(environ)
    sanitizer = "" if shutil.which("compute-sanitizer") else "no compute-sanitizer in PATH"
    return Machine(gpu, nccl, mpi, _lacking("pytest") or _lacking("ml_dtypes"), tensorflow, sanitizer,
                   "" if find_cupti() else "no libcupti.so", _lacking("torch"))


def facts() -> list[str]:
    """Return one line each for the GPU with its driver, and for the version of each package."""
    found = [f"{name} {version}" for name in ("mpistrat", "tensorflow", "keras", "cupy-cuda12x", "cupy-cuda13x",
                                              "nvidia-nccl-cu12", "nvidia-nccl-cu13", "mpi4py")
             if (version := _version(name))]
    try:
        done = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"],
                              capture_output=True, text=True, timeout=PROBE_LIMIT_S, check=False)
        return [*done.stdout.splitlines(), *found]
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"no nvidia-smi: {error}", *found]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def run_all(parts: Sequence[Part], machine: Machine, environ: Mapping[str, str] = os.environ) -> list[Outcome]:
    """Run all parts, even if some fail. The output of this process has their output, and a line after each part."""
    outcomes = []
    for part in parts:
        reason = part.why_skipped(machine)
        if not reason:
            print(f"\n== {part.name}: {' '.join(part.command)}", flush=True)
        outcomes.append(Outcome(part, f"skipped: {reason}") if reason else _run(part, environ))
        print("== ended: " + summary(outcomes[-1:]), flush=True)
    return outcomes


def summary(outcomes: Sequence[Outcome]) -> str:
    width = max(len(outcome.part.name) for outcome in outcomes)
    return "\n".join(f"{outcome.part.name:{width}}  {outcome.seconds:4.0f} s  {outcome.text}" for outcome in outcomes)


def _run(part: Part, environ: Mapping[str, str]) -> Outcome:
    log = {} if "pytest" in part.command else {"MPISTRAT_LOG_LEVEL": "info"}  # It has what is chosen.
    surroundings = {**SURROUNDINGS, **log, **environ}
    began = time.monotonic()
    try:
        process = subprocess.Popen(part.command, cwd=ROOT, env=surroundings, start_new_session=True)
    except OSError as error:
        return Outcome(part, f"FAILED to start: {error}")
    try:
        code = process.wait(part.limit_s)
        text = "passed" if code == 0 else f"FAILED with code {code}"
    except subprocess.TimeoutExpired:
        text = f"FAILED: not done in {part.limit_s:g} s"
    finally:
        # What it started ends with it.
        _end_group(process)
    return Outcome(part, text, time.monotonic() - began)


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):  # mpirun ends its ranks when it gets the first one
        try:
            os.killpg(process.pid, number)
            process.wait(GRACE_S)
        except ProcessLookupError:
            return  # All have ended.
        except subprocess.TimeoutExpired:
            continue


def _answer(code: str, environ: Mapping[str, str]) -> Any:
    """Run Python code, and return the JSON that it prints after "found ". If it prints none, return the reason."""
    try:
        done = subprocess.run([_PYTHON, "-c", code], cwd=ROOT, env=dict(environ), capture_output=True, text=True,
                              timeout=PROBE_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer in {PROBE_LIMIT_S:g} s"
    lines = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    if not lines:
        return f"ended with code {done.returncode}: {' '.join(done.stderr.split())[-200:]}"
    return json.loads(lines[-1].removeprefix("found "))


def _lacking(package: str) -> str:
    return "" if importlib.util.find_spec(package) else f"{package} is not installed"


def _why_no_mpirun(environ: Mapping[str, str]) -> str:
    try:
        find_mpirun(None, environ)
    except LaunchError as error:
        return str(error)
    return ""
