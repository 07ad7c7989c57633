"""The actions that the Plan of an elastic job returns, and the limits of the Plan. Pure data."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of an elastic job."""

    # min_np, max_np: The least and the most ranks.
    min_np: int = 1
    max_np: int = 1
    timeout_s: float = 600.0  # How long the job waits for `min_np` slots.
    resets: int | None = None  # The most generations after the first that start because of a loss; None: no limit.
    # How long a lost host is left out, the first time and at most; each loss doubles the time.
    cooldown_s: tuple[float, float] = (30.0, 600.0)
    restart_failed: bool = False  # Whether a new generation replaces lost ranks, at the next commit.


@dataclass(frozen=True)
class Start:
    generation: int
    ranks: int
    hosts: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Leave:
    """Tell the ranks of `generation` to end at their next commit."""

    generation: int
    why: str


@dataclass(frozen=True)
class Stop:
    """End the mpirun of `generation` now. `is_done`: Whether all ranks have already ended with code 0."""

    generation: int
    why: str
    is_done: bool = False


@dataclass(frozen=True)
class Done:
    """End the job with exit code `code`."""

    code: int
    why: str


@dataclass(frozen=True)
class Say:
    """Print a sentence."""

    text: str


Action = Start | Leave | Stop | Done | Say
