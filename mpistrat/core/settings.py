"""All settings of mpistrat, read once by init() from MPISTRAT_* environment variables.

Only this module reads MPISTRAT_*. Other modules get settings as arguments. Settings that Horovod has too keep their
names: HOROVOD_X becomes MPISTRAT_X. The runtime calls `Settings.from_env` in init().
"""

import difflib
import logging
import os
import re
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal, TypeVar, get_args

from .errors import SettingsError
from .topology import describe_by_rank

T = TypeVar("T")

PREFIX = "MPISTRAT_"
HOROVOD_PREFIX = "HOROVOD_"
# Names after MPISTRAT_ that are not settings: variables that environment modules of clusters set for a package (Lmod,
# EasyBuild, Spack), and that Kubernetes sets in each container for a service whose name begins with "mpistrat"
# (https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables).
_OF_OTHERS = re.compile(r"ROOT|DIR|VERSION|HOME|(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|"
                        r"PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)")
_LEAST_CHUNK_BYTES = 4096  # So that each rank's slice of a chunk has at least a few cache lines.
FastWay = Literal["fast_path", "fixed_input", "shadow", "small_buckets", "stream_order", "xla"]


def _setting(env: str, default: T, doc: str, **allowed: Any) -> T:
    """Return a dataclass field with its environment name (without prefix), its documentation and its `allowed` values.

    `allowed`: `low` and `high` of a number; for a text `choices` (one of these), `words` (some of these) or neither.
    """
    return field(default=default, metadata={"env": env, "doc": doc, **allowed})


@dataclass(frozen=True)
class Settings:
    """All settings, with their defaults. docs/settings.md shows the rows of `Settings.table()`."""

    fusion_bytes: int = _setting(
        "FUSION_THRESHOLD", 128 * 1024 * 1024, "Bytes of one fusion buffer; ready tensors are reduced together up to "
        "this size. 0: no fusion.", low=0, high=2**40)
    cache_capacity: int = _setting(
        "CACHE_CAPACITY", 16384, "Number of requests that a rank remembers. It sends the number of a repeated "
        "request instead of its full description. 0: none.", low=0, high=2**24)
    stall_check_disable: bool = _setting(
        "STALL_CHECK_DISABLE", False, "1: wait without a limit, and without a report, for tensors that other ranks "
        "never submit and for collectives that do not end, on CPUs and GPUs alike.")
    stall_warning_s: float = _setting(
        "STALL_CHECK_TIME_SECONDS", 60.0,
        "Seconds after which a tensor that only some ranks have submitted is reported.", low=0.1, high=1e7)
    stall_abort_s: float = _setting(
        "STALL_SHUTDOWN_TIME_SECONDS", 600.0,
        "Seconds after which a tensor that only some ranks have submitted ends the job with an "
        "error on every rank. 0: never.", low=0, high=1e7)
    deadlock_s: float = _setting(
        "DEADLOCK_S", 10.0, "Seconds after which ranks that all wait for each other get an error: every rank waits for "
        "a collective, no collective is complete, and no rank has called a further collective. Raise it if a rank may "
        "call its next collective later than that, in another thread or after long work. 0: never.",
        low=0, high=1e7)
    lost_after_s: float = _setting(
        "LOST_AFTER_S", 5.0, "Seconds without an answer after which a host is lost, because it is down or the link to "
        "it is cut. Its kernel is probed five times in these seconds, at most once a second. 0: hosts are not probed.",
        low=0, high=1e5)
    stopped_limit_s: float = _setting(
        "STOPPED_LIMIT_S", 0.0, "Seconds after which a rank whose process is stopped (SIGSTOP) is killed. An elastic "
        "job then goes on without it. A stopped rank is reported after 5 s. 0: never.", low=0, high=1e7)
    launcher_check_disable: bool = _setting(
        "LAUNCHER_CHECK_DISABLE", False, "1: a rank goes on when the process that launched it (of mpirun or srun) has "
        "ended. By default the rank then ends within seconds, with the processes that it has started.")
    check_every: int = _setting(
        "CHECK_EVERY", 1000, "Number of batches after which fit, within an epoch, compares the ranks' weights and the "
        "state of their optimizers; and number of commits after which an elastic state compares the trained weights. "
        "0: never; fit still compares at the end of each epoch.", low=0, high=2**31)
    check_action: str = _setting(
        "CHECK_ACTION", "abort", "What happens when weights or optimizers of the ranks differ by more than rounding. "
        "abort: an error on every rank. warn: a warning. off: no consistency checks (weights, data, steps, callbacks, "
        "learning rates). What fit computes is the same in each case.", choices=("abort", "warn", "off"))
    nan_warning: bool = _setting(
        "NAN_WARNING", True, "1: a warning names the rank and the tensors in which the first Inf or NaN of a gradient "
        "was. Only dense gradients that are reduced on the CPU are looked at. 0: no warning.")
    join_average: str = _setting(
        "JOIN_AVERAGE", "active", "What an average divides by while some ranks have called join(). active: the number "
        "of ranks that give a tensor. all: the number of all ranks, as in Horovod.", choices=("active", "all"))
    cpu_operations: str = _setting(
        "CPU_OPERATIONS", "auto", "Backend for CPU tensors. auto: first available of shared_memory, mpi. "
        "shared_memory: shared memory within hosts, MPI between hosts. mpi: MPI throughout.",
        choices=("auto", "shared_memory", "mpi"))
    chunk_bytes: int = _setting(
        "CHUNK_BYTES", 0, "Bytes of a chunk of an all-reduce in shared memory, a power of two. 0: on one host a job "
        "tries 512 KiB, 2 MiB and 4 MiB on its own all-reduces, as far as the host's memory allows, and keeps the "
        "fastest; with several hosts 2 MiB.", low=0, high=2**28)
    gpu_operations: str = _setting(
        "GPU_OPERATIONS", "auto", "Backend for GPU tensors. auto: first available of nccl, staged; if process sets "
        "overlap, only one of them uses nccl. nccl: NCCL in all sets. staged: copy through pinned host memory to the "
        "backend for CPU tensors. host: treat as CPU tensors, together with those of ranks without a GPU.",
        choices=("auto", "nccl", "staged", "host"))
    nccl_streams: int = _setting(
        "NUM_NCCL_STREAMS", 1, "Number of NCCL communicators, each with its own streams. They reduce buckets of GPU "
        "tensors in turn.", low=1, high=16)
    disable: str = _setting(
        "DISABLE", "none", "Optimizations to switch off, separated by commas. fast_path: a vote, in shared memory, on "
        "an operation for which all ranks wait. Without it rank 0 negotiates every operation; slower, with the same "
        "results. fixed_input: datasets of tf.data without TensorFlow's autotuning, whose threads may stop all ranks "
        "for a minute at the end of an iterator. Maps stay parallel. shadow: the proofs that NCCL gives right numbers: "
        "a sum of known numbers when it connects, and the first two reductions of each kind, which the CPU repeats and "
        "compares. small_buckets: gradients in buckets of 4 MiB on several hosts. Without it they have 16 MiB, as on "
        "one host. stream_order: the caller's stream on the GPU waits for the end of a collective, if a check has "
        "shown that it does. Without it the host waits. xla: collectives that XLA compiles, with TensorFlow 2.21 and "
        "later. Without it they are an error in a function with jit_compile=True, and Keras models are trained "
        "without XLA.", words=get_args(FastWay))
    bind: str = _setting(
        "BIND", "all", "What each rank of a host gets for itself. cores: an equal share of the cores that the job may "
        "use on the host, unless the launcher has bound the ranks. gpu: a GPU, which init() of mpistrat.tensorflow and "
        "of mpistrat.keras, and MPIStrategy, assign as pin_gpu() does. all: both. none: neither.",
        choices=("all", "cores", "gpu", "none"))
    recorder: str = _setting(
        "RECORDER", "all", "Which files the operations that ranks record are written to. all: once a second rank 0 "
        "writes the state of all ranks to a file, which mpistrat top reads; and if a job fails, mpistrat run writes "
        "the last operations of its ranks to a timeline, in the subdirectory .mpistrat of the working directory. "
        "status: only the file for mpistrat top. 0: nothing is recorded, and there is no timeline.",
        choices=("all", "status", "0"))
    timeline: str = _setting(
        "TIMELINE", "none", "File to which rank 0 writes the operations of all ranks, as start_timeline does, in "
        "Chrome's trace format. none, or DYNAMIC as in Horovod: no file before start_timeline.")
    timeline_mark_cycles: bool = _setting(
        "TIMELINE_MARK_CYCLES", False, "1: mark in the timeline when each rank begins to execute the operations on "
        "which the ranks have agreed.")
    timeline_steps: str = _setting(
        "TIMELINE_STEPS", "all", "Steps of training that are in the timeline, as FIRST:END. The first step is 0, and "
        "END is not included. all: all steps.")
    log_level: str = _setting(
        "LOG_LEVEL", "warning", "Least severity of the messages shown: debug, info, warning or error.",
        choices=("debug", "info", "warning", "error"))

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> "Settings":
        """Read the settings from `environ`. Skip names that other programs use, such as MPISTRAT_HOME.

        Raises SettingsError: MPISTRAT_ names are unknown, or values are malformed or out of range. The text lists all
        of them.
        """
        by_env = {PREFIX + f.metadata["env"]: f for f in fields(cls)}
        values: dict[str, Any] = {}
        problems: list[str] = []
        for name in sorted(n for n in environ if n.startswith(PREFIX)):
            if name not in by_env and _OF_OTHERS.fullmatch(name.removeprefix(PREFIX)):
                continue
            if name not in by_env:
                # Compared without the prefix, since with the prefix all names are similar.
                near = difflib.get_close_matches(name.removeprefix(PREFIX), [n.removeprefix(PREFIX) for n in by_env], 3)
                hint = f"Did you mean {' or '.join(PREFIX + n for n in near)}?" if near \
                    else "The page Settings of the documentation (docs/settings.md) has all settings."
                problems.append(f"{name} is not a setting of mpistrat. {hint} "
                                f"If another program uses it: unset {name}.")
                continue
            try:
                values[by_env[name].name] = _parse(by_env[name], environ[name])
            except ValueError as error:
                problems.append(f"{name}={environ[name]!r}: {error}")
        if problems:
            raise SettingsError(" ".join(problems))
        settings = cls(**values)
        if 0 < settings.stall_abort_s < settings.stall_warning_s:
            raise SettingsError(
                f"{PREFIX}STALL_SHUTDOWN_TIME_SECONDS ({settings.stall_abort_s:g}) must be 0 or at least "
                f"{PREFIX}STALL_CHECK_TIME_SECONDS ({settings.stall_warning_s:g}).")
        next_power = max(_LEAST_CHUNK_BYTES, 2**(max(settings.chunk_bytes, 1) - 1).bit_length())
        if settings.chunk_bytes not in (0, next_power):
            raise SettingsError(f"{PREFIX}CHUNK_BYTES={settings.chunk_bytes}: expected 0 or a power of two, at least "
                                f"{_LEAST_CHUNK_BYTES}; the next power of two is {next_power}.")
        if settings.timeline_steps != "all" and settings.timeline_window is None:
            raise SettingsError(f"{PREFIX}TIMELINE_STEPS={settings.timeline_steps!r}: expected all, or FIRST:END "
                                "with FIRST less than END, for example 100:120.")
        return settings

    @classmethod
    def table(cls) -> list[tuple[str, str, str]]:
        """Return the rows (environment name, default, documentation) of all settings."""
        def shown(value: object) -> str:
            return f"{value:g}" if isinstance(value, float | bool) else str(value)
        return [(PREFIX + f.metadata["env"], shown(f.default), f.metadata["doc"]) for f in fields(cls)]

    def uses(self, way: FastWay) -> bool:
        """Return whether the optimisation `way` may be used: MPISTRAT_DISABLE does not list it."""
        return way not in self.disable.split(",")

    @property
    def limit_s(self) -> float:
        """The longest time in seconds that a rank waits for other ranks; 0: no limit."""
        return 0.0 if self.stall_check_disable else self.stall_abort_s

    @property
    def probe_s(self) -> float:
        """Seconds between two probes of another host: at least 1, because the kernel counts in whole seconds."""
        return max(1.0, self.lost_after_s / 5)

    @property
    def is_checked(self) -> bool:
        """Whether the ranks check that they train the same model."""
        return self.check_action != "off"

    @property
    def is_recorded(self) -> bool:
        return self.recorder != "0"

    @property
    def timeline_window(self) -> tuple[int, int] | None:
        """`timeline_steps` as numbers (first, end); None for all steps, or if the text is not FIRST:END."""
        found = re.fullmatch(r"(\d+):(\d+)", self.timeline_steps)
        return (int(found[1]), int(found[2])) if found and int(found[1]) < int(found[2]) else None

    @property
    def logging_level(self) -> int:
        return int(getattr(logging, self.log_level.upper()))


def taken_from_horovod(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the MPISTRAT_ variables for the HOROVOD_ variables in `environ`. An MPISTRAT_ variable in `environ` wins.

    HOROVOD_ variables without a counterpart, or with a value that the setting does not accept, are left out.
    """
    taken = {}
    for f in fields(Settings):
        own, name = PREFIX + f.metadata["env"], HOROVOD_PREFIX + f.metadata["env"]
        if name in environ:
            with suppress(SettingsError):
                Settings.from_env({own: environ[name]})
                taken[own] = environ.get(own, environ[name])
    return taken


def take_horovods(environ: MutableMapping[str, str]) -> None:
    """Replace HOROVOD_ variables in `environ` by the MPISTRAT_ variables that taken_from_horovod returns."""
    for own, value in taken_from_horovod(environ).items():
        environ[own] = value
        del environ[HOROVOD_PREFIX + own.removeprefix(PREFIX)]


def horovod_warning(environ: Mapping[str, str]) -> list[str]:
    """Return a list of one warning, with a sentence for each HOROVOD_ variable in `environ`; [] if there is none."""
    known = {f.metadata["env"] for f in fields(Settings)}
    sentences = [f"{name} is not read; use {PREFIX}{name.removeprefix(HOROVOD_PREFIX)}."
                 if name.removeprefix(HOROVOD_PREFIX) in known else f"{name} is not read and has no counterpart."
                 for name in sorted(environ) if name.startswith(HOROVOD_PREFIX)]
    return [" ".join(sentences)] if sentences else []


def differing(by_rank: list[Settings]) -> list[str]:
    """Return a sentence for each setting that differs among the ranks. `by_rank[r]` has the settings of rank r."""
    values = {f.metadata["env"]: [getattr(settings, f.name) for settings in by_rank] for f in fields(Settings)}
    return [f"{PREFIX}{name}: the ranks disagree: {describe_by_rank(of_ranks)}."
            for name, of_ranks in values.items() if len(set(of_ranks)) > 1]


def _parse(setting: "Field[Any]", text: str) -> bool | int | float | str:
    """Convert `text` to the type of the field's default, and check its range. Raises ValueError with the reason."""
    default: Any = setting.default
    meta, kind = setting.metadata, type(default)
    text = text.strip()
    if kind is bool:
        if text.lower() not in ("0", "1", "false", "true"):
            raise ValueError("expected 0 or 1.")
        return text.lower() in ("1", "true")
    if "words" in meta:
        words = sorted({word.strip() for word in text.lower().split(",")})
        if words != ["none"] and (unknown := [word for word in words if word not in meta["words"]]):
            raise ValueError(f"expected 'none', or one or more of {', '.join(meta['words'])}, separated by commas. "
                             f"Unknown: {', '.join(map(repr, unknown))}.")
        return ",".join(words)
    if kind is str:
        if "choices" not in meta:
            return os.path.expanduser(text)  # A shell does not expand "~" in arguments of `env` or mpirun's -x.
        if text.lower() not in meta["choices"]:
            raise ValueError(f"expected one of {', '.join(meta['choices'])}.")
        return text.lower()
    try:
        value = kind(text)
    except ValueError:
        raise ValueError(f"expected {'a whole number' if kind is int else 'a number'}.") from None
    if not meta["low"] <= value <= meta["high"]:  # NaN is in no range.
        raise ValueError(f"expected a value from {meta['low']:g} to {meta['high']:g}.")
    return value
