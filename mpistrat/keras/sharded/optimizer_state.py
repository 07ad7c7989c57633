"""OptimizerState: what mpistrat knows of a Keras optimizer. It is the attribute `_mpistrat` of the optimizer; local."""

from dataclasses import dataclass, field

import keras

from ...api.process_sets import ProcessSet
from ...core.errors import InvalidRequestError
from ...core.request import ReduceOp
from ...tensorflow.bridge import names
from ...tensorflow.gradients import GradientOptions, GradientReducer
from .parts import Parts
from .shard_state import WholeState


@dataclass
class Arguments:
    """The arguments of DistributedOptimizer that a configuration of Keras does not have. Copies have the same."""

    name: names.OptimizerName  # Begins the names of collectives; those of copies begin with it too
    factor: float  # What the mean of accumulated gradients is multiplied by
    options: GradientOptions
    op: ReduceOp
    gradient_predivide_factor: float
    process_set: ProcessSet | None  # None: all ranks
    scale_local_gradients: bool
    average_statistics: bool
    uneven: str
    check_weights: bool
    shard_state: bool
    passes: int  # How many passes an optimizer of Keras 2 accumulates. Keras 3 has it in the configuration.


@dataclass
class OptimizerState:
    """The attribute `_mpistrat` of an optimizer whose gradients are averaged, by itself or by a strategy."""

    class_name: str  # The class of the optimizer
    reducer_or_none: GradientReducer | None = None  # None: it can be loaded, copied and saved, and does not train
    arguments: Arguments | None = None  # Those of a distributed optimizer
    is_copy: bool = False  # Keras has made the optimizer from the original
    # This rank's parts of the variables, and the whole state, if these are divided among the ranks.
    parts: Parts | None = None
    whole: WholeState | None = None
    owner: int | None = None  # The rank that has all parts; None: they are divided
    called: set[str] = field(default_factory=set)  # The hooks that Keras has called
    accumulating: list[keras.Variable] | None = None  # While accumulated gradients are applied, their variables

    @property
    def reducer(self) -> GradientReducer:
        """What averages the gradients."""
        if self.reducer_or_none is None:
            raise InvalidRequestError(
                f"this {self.class_name} cannot average gradients: it was made by the class of a distributed "
                "optimizer, or it is a copy that does not know the original's local variables (register_local_var), "
                "groups of variables, process set or parts. Write hvd.DistributedOptimizer(keras.optimizers."
                f"{self.class_name}(...)) in its place.")
        return self.reducer_or_none

    @property
    def factor(self) -> float:
        """What the mean of accumulated gradients is multiplied by."""
        return 1.0 if self.arguments is None else self.arguments.factor
