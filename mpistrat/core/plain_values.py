"""Checks of plain values from another process, which may have any type. Pure."""

from typing import TypeGuard, TypeVar

T = TypeVar("T")

RANKS = range(2**31)
COUNTS = range(2**63)
EXTENTS = range(-1, 2**63)  # of a dimension; -1: differs among ranks


def is_tuple_of(values: object, kind: type[T]) -> TypeGuard[tuple[T, ...]]:
    """Whether `values` is a tuple whose items all have exactly that type."""
    return type(values) is tuple and set(map(type, values)) <= {kind}


def are_in(allowed: range, values: object) -> bool:
    """Whether `values` is a tuple of integers in `allowed`."""
    return (type(values) is tuple and is_tuple_of(values, int)
            and (not values or (min(values) in allowed and max(values) in allowed)))
