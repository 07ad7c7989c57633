"""Tests in one process, of which several files share a worker of pytest-xdist."""

from collections.abc import Iterator

import pytest

import mpistrat


@pytest.fixture(scope="module", autouse=True)
def _shut_down() -> Iterator[None]:
    """End what a file's tests have begun: the trace thread opens files each second, which other tests count."""
    yield
    mpistrat.shutdown()
