"""Names of horovod.tensorflow that belong to TensorFlow 1's sessions. They say what takes their place.

For users; each raises an error.
"""

from typing import Any, NoReturn

_TEXT = ("{name} is for TensorFlow 1's sessions, which mpistrat does not support. Call broadcast_variables(variables, "
         "root_rank) after the variables have been created, or pass callbacks.BroadcastGlobalVariablesCallback("
         "root_rank) of mpistrat.keras to fit().")


def broadcast_global_variables(root_rank: int) -> NoReturn:
    """Raise RuntimeError: there is no collection of all variables in TensorFlow 2. Use broadcast_variables. Local."""
    raise RuntimeError(_TEXT.format(name="broadcast_global_variables()"))


class BroadcastGlobalVariablesHook:
    """Raises RuntimeError when it is made: TensorFlow 2 has no sessions to hook into.

    Use broadcast_variables, or the callback BroadcastGlobalVariablesCallback of mpistrat.keras.
    """

    def __init__(self, root_rank: int, device: str = "", **_: Any):
        raise RuntimeError(_TEXT.format(name="BroadcastGlobalVariablesHook"))
