"""Two levels of tests: plain `pytest` and `.ci/run` run what is not marked as nightly, and nightly runs everything."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def sample(names: str | Sequence[str], values: Iterable[Any], ids: Callable[[Any], str] | Sequence[str] | None = None,
           ) -> pytest.MarkDecorator:
    """As pytest.mark.parametrize; all values except the first are nightly: they repeat what it shows."""
    is_one = isinstance(names, str) and "," not in names
    first, *others = (value if isinstance(value, ParameterSet) else pytest.param(*([value] if is_one else value))
                      for value in values)
    repeats = (pytest.param(*other.values, id=other.id, marks=[*other.marks, pytest.mark.nightly]) for other in others)
    return pytest.mark.parametrize(names, [first, *repeats], ids=ids)
