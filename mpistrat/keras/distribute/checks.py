"""Checks under MPIStrategy: all ranks train the same weights, with the same learning rates.

fit calls them when training begins, within an epoch and when it ends, and loops of the user's in the first step of an
optimizer.
Collective, outside of a replica and of graphs.
"""

from collections.abc import Iterable, Sequence

import keras
from keras.optimizers import Optimizer

from ...api import ops as array_ops
from ...api import runtime
from ...core.errors import MismatchError
from ...tensorflow.equal_weights import require_equal_weights
from ...tensorflow.names import eager
from ..fit.rates import different_rate, rates_of
from ..optimizer_parts import parts_of

_CAUSES = ("weights that were loaded or assigned on some ranks only (call load_weights, load_model and set_weights on "
           "all ranks), and a callback or a learning rate on some ranks only.")


def require_same_training(variables: Sequence[keras.Variable], optimizers: Iterable[Optimizer | None],
                          place: str, action: str = "abort") -> None:
    """Raise MismatchError on every rank unless all ranks have the same weights and rates.

    Args:
        variables: The weights that are trained, and what else is to be compared.
        optimizers: As many on all ranks; None is left out.
        place: When this is, for messages: "at the end of epoch 3".
        action: What different weights are: the argument of require_equal_weights.
    """
    if runtime.current().settings.consistency_check_disable or runtime.current().topology.size == 1:
        return
    own = rates_of(part for optimizer in optimizers for part in parts_of(optimizer))
    different = different_rate(array_ops.allgather_object(own, eager("strategy/rates")))
    if different:
        raise MismatchError(f"{place} {different} Set it to the same value on all ranks, and give all ranks the same "
                            "callbacks.")
    require_equal_weights(variables, eager("strategy/weights"), place, causes=_CAUSES, action=action)
