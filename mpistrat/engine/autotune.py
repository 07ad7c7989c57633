"""Autotune: tries several ways to reduce during the first steps, and keeps the quickest. Pure.

It is a search along one knob after the other, each with the best values of those before it. Only rank 0 measures; what
it chooses reaches all ranks in a Decision, so that they change at the same point.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.tuning import (
    AUTOTUNE_LEAST_BYTES,
    AUTOTUNE_LEAST_RATIO,
    AUTOTUNE_SAMPLE_ROUNDS,
    AUTOTUNE_WARM_UP_ROUNDS,
)

Choice = dict[str, Any]


@dataclass
class Autotuner:
    """The search.

    Args:
        knobs: The values that can be tried for each knob; the first one is what is used at the beginning.
    """

    knobs: Mapping[str, Sequence[Any]]
    best: Choice = field(init=False)
    is_done: bool = field(init=False, default=False)
    tried: list[tuple[Choice, float]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.best = self.first
        self._to_try: list[Choice] = [dict(self.best)]
        self._names = [name for name, values in self.knobs.items() if len(values) > 1]
        self._best_rate = 0.0
        self._rounds = 0
        self._bytes = 0
        self._seconds = 0.0
        if not self._names:
            self.is_done = True

    def record(self, nbytes: int, seconds: float) -> Choice | None:
        """Note a round of `nbytes` that took `seconds`; returns what to use from now on if that is to change."""
        if self.is_done or nbytes < AUTOTUNE_LEAST_BYTES:
            return None
        self._rounds += 1
        if self._rounds <= AUTOTUNE_WARM_UP_ROUNDS:
            return None
        self._bytes += nbytes
        self._seconds += seconds
        if self._rounds < AUTOTUNE_WARM_UP_ROUNDS + AUTOTUNE_SAMPLE_ROUNDS:
            return None
        choice, rate = self._to_try.pop(0), self._bytes / self._seconds
        self.tried.append((choice, rate))
        if rate > AUTOTUNE_LEAST_RATIO * self._best_rate or len(self.tried) == 1:
            self.best, self._best_rate = choice, rate
        self._rounds, self._bytes, self._seconds = 0, 0, 0.0
        return self._next()

    def _next(self) -> Choice:
        while not self._to_try and self._names:
            name = self._names.pop(0)
            self._to_try = [{**self.best, name: value} for value in self.knobs[name] if value != self.best[name]]
        if self._to_try:
            return self._to_try[0]
        self.is_done = True
        return self.best

    @property
    def first(self) -> Choice:
        """What was used at the beginning."""
        return {name: values[0] for name, values in self.knobs.items()}

    @property
    def gain(self) -> float:
        """How many times as fast the best choice was as the first one."""
        return self._best_rate / self.tried[0][1] if self.tried else 1.0

    def report(self) -> str:
        """A log of the search as JSON: `best`, `gain`, and `tried` with bytes per second."""
        tried = [{**choice, "bytes_per_second": round(rate)} for choice, rate in self.tried]
        return json.dumps({"best": self.best, "gain": round(self.gain, 3), "tried": tried}, indent=1)


def read_report(text: str, knobs: Mapping[str, Sequence[Any]]) -> Choice:
    """The best choice of an earlier report.

    Raises:
        ValueError: It is no such report, or has a choice that is not among `knobs`.
    """
    try:
        best = json.loads(text)["best"]
        fits = set(best) == set(knobs) and all(best[name] in values for name, values in knobs.items())
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"not a log of autotune: {error!r}") from error
    if not fits:
        raise ValueError(f"it was made for other ranks or hosts: {best} is not among {dict(knobs)}")
    return dict(best)
