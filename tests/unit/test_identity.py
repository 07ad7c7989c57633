"""IdentitySet: what is in it stays what it was."""

import pytest

pytest.importorskip("tensorflow")

from mpistrat.tensorflow.kerases import IdentitySet


def test_it_compares_by_identity() -> None:
    first, second = [1], [1]
    members = IdentitySet([first])
    assert first in members and second not in members
    members.add(second)
    assert second in members


def test_what_is_made_later_does_not_take_the_place_of_a_member_that_nobody_else_has() -> None:
    members = IdentitySet()
    members.add(object())
    assert not any(object() in members for _ in range(1000))
