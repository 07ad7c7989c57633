"""The list of Keras functions that MPIStrategy replaces, and how they are replaced and put back.

The modules beside this one register their replacements with `replaces`. A replacement behaves as the original does
unless an MPIStrategy is in use. All were run with Keras 3.10 to 3.15. Called when the first strategy is made, and by
the modules that register.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

Function = Callable[..., Any]
F = TypeVar("F", bound=Function)


@dataclass(frozen=True)
class Patch:
    """A function of Keras and its replacement.

    Attributes:
        owner: The class or module that has the function.
        name: The function's name there.
        replacement: Called with the original, and then the arguments of the call.
        reason: What would happen without it.
    """

    owner: type | ModuleType
    name: str
    replacement: Function
    reason: str


PATCHES: list[Patch] = []
# Each applied patch with the owner's own function of that name; None if the owner inherits the function.
_applied: list[tuple[Patch, Function | None]] = []


def replaces(owner: type | ModuleType, name: str, reason: str) -> Callable[[F], F]:
    """A decorator that registers a function as the replacement of `owner.name`; for the arguments see Patch."""
    def register(replacement: F) -> F:
        PATCHES.append(Patch(owner, name, replacement, reason))
        return replacement
    return register


def apply() -> None:
    """Replace the functions, once."""
    if _applied:
        return
    for patch in PATCHES:
        original = getattr(patch.owner, patch.name)
        _applied.append((patch, vars(patch.owner).get(patch.name)))
        setattr(patch.owner, patch.name, _bound(patch.replacement, original))


def _bound(replacement: Function, original: Function) -> Function:
    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)
    return replaced


def undo() -> None:
    """Put the originals back."""
    while _applied:
        patch, own = _applied.pop()
        if own is None:
            delattr(patch.owner, patch.name)
        else:
            setattr(patch.owner, patch.name, own)
