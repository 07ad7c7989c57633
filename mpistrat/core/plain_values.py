"""Checks on plain values that came from another process and may be anything."""

from typing import Any

RANKS = range(2**31)


COUNTS = range(2**63)


EXTENTS = range(-1, 2**63)  # of a dimension; -1 may differ among ranks


def is_tuple_of(kind: type, values: Any) -> bool:
    return type(values) is tuple and set(map(type, values)) <= {kind}


def are_in(allowed: range, values: Any) -> bool:
    """Whether it is a tuple of whole numbers of that range."""
    return is_tuple_of(int, values) and (not values or (min(values) in allowed and max(values) in allowed))
