"""Keras under MPIStrategy: the functions of Keras that are replaced, ordered by Keras' concepts.

trainer: fit, evaluate, predict, and the random seeds of layers. optimizer: gradients, clipping, loss scaling, and the
slots of variables="central". callbacks: which callbacks run where. saving: files of models. `patches` holds the list of
replacements, and step_state what they share while a step is traced.

MPIStrategy imports this package when the first strategy is created, then calls `apply`. The import raises
MissingDependencyError where Keras is too old.
"""

from .._private import require_for_strategy

require_for_strategy()

from ..fit import wrap_fit  # noqa: E402
from ..whole_files import wrap_saving  # noqa: E402
from . import callbacks, optimizer, patches, saving, step_state, trainer  # noqa: E402, F401
from .patches import PATCHES, undo  # noqa: E402

__all__ = ["PATCHES", "apply", "undo"]


def apply() -> None:
    """Replace the functions, once. Raises MissingDependencyError where Keras is too old."""
    require_for_strategy()
    wrap_fit()
    wrap_saving()  # Before the replacements: all ranks must give them the user's path.
    patches.apply()
