"""OptimizerState: mpistrat's state of a Keras optimizer, in the optimizer's attribute `_mpistrat`. Local."""

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
    """The arguments of DistributedOptimizer that a Keras configuration does not contain. Copies have the same."""

    name: names.OptimizerName  # The prefix of the names of collectives, also of copies
    factor: float  # The factor for the mean of accumulated gradients
    options: GradientOptions
    op: ReduceOp
    gradient_predivide_factor: float
    process_set: ProcessSet | None  # None: all ranks
    scale_local_gradients: bool
    average_statistics: bool
    uneven: str
    check_weights: bool
    shard_state: bool
    passes: int  # The number of passes that a Keras 2 optimizer accumulates. Keras 3 has it in the configuration.


@dataclass
class OptimizerState:
    """The attribute `_mpistrat` of an optimizer whose gradients are averaged, by itself or by a strategy."""

    class_name: str  # The class of the optimizer
    reducer_or_none: GradientReducer | None = None  # None: the optimizer cannot train, but be loaded, copied and saved
    arguments: Arguments | None = None  # The arguments of a distributed optimizer
    is_copy: bool = False  # Whether Keras has made the optimizer from the original
    # This rank's parts of the variables, and the whole state, if the state is divided among the ranks.
    parts: Parts | None = None
    whole: WholeState | None = None
    owner: int | None = None  # The rank that has all parts; None: the parts are divided
    called: set[str] = field(default_factory=set)  # The hooks that Keras has called
    accumulating: list[keras.Variable] | None = None  # The variables of accumulated gradients while these are applied

    @property
    def reducer(self) -> GradientReducer:
        """The reducer of the gradients. Raises InvalidRequestError if the optimizer cannot train."""
        if self.reducer_or_none is None:
            raise InvalidRequestError(
                f"this {self.class_name} cannot average gradients. It was made by calling the class of a distributed "
                "optimizer, or is a copy without the original's local variables (register_local_var), groups of "
                "variables, process set or parts. Write hvd.DistributedOptimizer(keras.optimizers."
                f"{self.class_name}(...)) instead.")
        return self.reducer_or_none

    @property
    def factor(self) -> float:
        """The factor for the mean of accumulated gradients."""
        return 1.0 if self.arguments is None else self.arguments.factor
