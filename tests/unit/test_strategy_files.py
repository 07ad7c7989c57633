"""Which ranks write a file after the chief has: those of other paths, and one of a host that does not see it."""

import pytest

pytest.importorskip("tensorflow")

from mpistrat.tensorflow.files import writes_too

HOSTS = [(0, 1), (0, 1), (2, 3), (2, 3)]


@pytest.mark.parametrize(("paths", "sees_file", "expected"), [
    (["a", "a", "a", "a"], True, []),
    (["a", "a", "a", "a"], False, [2]),
    (["a", "b", "c", "d"], False, [1, 2, 3]),
    (["a", "b", "b", "b"], False, [1]),
    (["a", "a", "b", "a"], False, [2, 3]),
])
def test_who_writes_after_the_chief(paths: list[str], sees_file: bool, expected: list[int]) -> None:
    assert [rank for rank in range(4) if writes_too(rank, paths, HOSTS[rank], sees_file)] == expected
