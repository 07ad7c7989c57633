"""GradientReducer: averages a list of gradients, dense, sparse or None, for the tape and the optimizers. Collective."""

from collections.abc import Sequence
from functools import cached_property

import tensorflow as tf

from ..api.process_sets import ProcessSet, global_process_set, resolved
from ..core.errors import InvalidRequestError, MpistratError
from ..core.request import Average, ReduceOp, ScaledOp, resolve_op
from . import first_steps, names
from .bridge.cpu import Observer, as_tf_error, to_array
from .compression import Compressor
from .first_steps import FirstSteps
from .gradient_groups import GradientGroups
from .identity import IdentitySet
from .lists import reduce_tensors
from .types import OptionalGradient, Tensor, Variable


class GradientReducer:
    """Averages (or sums) lists of gradients over the ranks. With one rank it does not change them.

    Args:
        optimizer: The name of the optimizer whose gradients are reduced; None: those of a tape are.
        compression: One of Compression.
        sparse_as_dense: Whether to convert tf.IndexedSlices to dense tensors first.
        op: Average or Sum.
        gradient_predivide_factor: Splits the division by the number of ranks N: by this factor before the sum, and by
            N / factor after it. Average only.
        scale_local_gradients: Whether gradients of local variables, which are not reduced, are divided by N.
        process_set: The ranks that take part. On other ranks gradients do not change.
        groups: Which gradients are reduced together; None: all.

    Attributes:
        changes_early: Whether the optimizer may change a variable before its gradient is reduced (weight decay).
        checks_weights: Whether the first reductions compare the weights of the ranks.
    """

    changes_early = False
    checks_weights = True

    def __init__(self, optimizer: names.OptimizerName | None, compression: type[Compressor], sparse_as_dense: bool,
                 op: ReduceOp, gradient_predivide_factor: float = 1.0, scale_local_gradients: bool = True,
                 process_set: ProcessSet = global_process_set, groups: GradientGroups | None = None):
        op = resolve_op(op, None)
        self._groups = groups or GradientGroups()
        self.process_set = resolved(process_set)
        if gradient_predivide_factor != 1.0 and op is not Average:
            raise InvalidRequestError("gradient_predivide_factor not supported with op != Average")
        if gradient_predivide_factor <= 0:
            raise InvalidRequestError(f"gradient_predivide_factor must be positive. Received: "
                                      f"{gradient_predivide_factor}")
        self.optimizer = optimizer
        self._compression, self._sparse_as_dense, self._op = compression, sparse_as_dense, op
        self._predivide = gradient_predivide_factor
        self._scale_local = scale_local_gradients
        self._local: IdentitySet[Variable] = IdentitySet()

    @cached_property
    def name(self) -> str:
        """The name of the optimizer, or the purpose of a tape's collective."""
        return "tape" if self.optimizer is None else self.optimizer()

    @cached_property
    def checks(self) -> FirstSteps | None:
        """What checks the first reductions; None: what is kept for the variables, as tapes need it."""
        return None if self.optimizer is None else FirstSteps(self.name, self.process_set)

    def register_local(self, variable: Variable) -> None:
        """Exclude this variable's gradients from the reduction."""
        self._local.add(variable)

    @property
    def has_local(self) -> bool:
        """Whether any variable was excluded."""
        return len(self._local) > 0

    def is_local(self, variable: Variable) -> bool:
        """Whether this variable was excluded."""
        return variable in self._local

    def reduce(self, gradients: Sequence[OptionalGradient], variables: Sequence[Variable]) -> list[OptionalGradient]:
        """Return the reduced gradients of `variables`. Collective. None stays None.

        Raises:
            InvalidRequestError: In a replica of MPIStrategy, which reduces gradients too.
            MismatchError: On every rank, when the ranks train different weights.
        """
        if getattr(tf.distribute.get_strategy().extended, "averages_gradients", False):
            raise InvalidRequestError("a DistributedOptimizer or DistributedGradientTape under MPIStrategy would "
                                      "average gradients twice. Take the optimizer or the tape that it was made from.")
        results = list(gradients)
        if not self.process_set.has_others():
            return results
        purpose, number = self.name, self.process_set.process_set_id or 0
        shared: list[int] = []
        for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if gradient is None:
                continue
            if variable in self._local:
                results[i] = self._local_gradient(gradient)
                continue
            if self._sparse_as_dense and isinstance(gradient, tf.IndexedSlices):
                results[i] = tf.convert_to_tensor(gradient)
            shared.append(i)
        trained = [variables[i] for i in shared]
        labels = list(map(label_of, trained))
        observer = self._observer(purpose, number, trained, labels)
        if observer is not None and tf.executing_eagerly():
            _observe_eagerly(observer, [results[i] for i in shared])
            observer = None
        name = names.made(purpose, number) if self.optimizer is None else names.of(purpose, number)
        groups = self._groups.divide(trained)
        # The last first: that is the order in which the backward pass computes them.
        for group, members in reversed(list(enumerate(groups))):
            places = [shared[member] for member in members]
            reduced = reduce_tensors(
                [results[i] for i in places], name if len(groups) == 1 else f"{name}/group{group}",
                ScaledOp(self._op, 1.0 / self._predivide, self._predivide), compression=self._compression,
                labels=[labels[member] for member in members], places=places, process_set=number, observer=observer)
            observer = None  # It is called once in each step.
            for i, gradient in zip(places, reduced, strict=True):
                results[i] = gradient
        return results

    def _observer(self, purpose: str, process_set: int, sources: Sequence[Variable],
                  labels: Sequence[str]) -> Observer | None:
        """What checks the reduction of the gradients of these sources, as long as there is something to check."""
        if self.checks is not None and self.checks.is_done:
            return None
        variables = [source for source in sources if hasattr(source, "assign")]  # A tape has tensors as sources too.
        if not variables:
            return None
        checks = self.checks or first_steps.of_tapes(
            names.eager(purpose, process_set) if tf.executing_eagerly() else purpose, self.process_set)
        # In a graph nothing orders a change of a variable that does not depend on its gradient, such as weight decay,
        # after the callback that reads the variable. What follows on a tape is not known here.
        may_read = self.checks_weights and (tf.executing_eagerly() or (self.checks is not None
                                                                       and not self.changes_early))
        if may_read and not tf.executing_eagerly():
            variables = first_steps.read_alone(variables, purpose)
        label_by_id = dict(zip(map(id, sources), labels, strict=True))
        return checks.observer(variables, [label_by_id[id(v)] for v in variables], may_read)

    def _local_gradient(self, gradient: Tensor) -> Tensor:
        if not self._scale_local:
            return gradient
        size = self.process_set.group(self.name).topology.size
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(gradient.values / size, gradient.indices, gradient.dense_shape)
        return gradient / size


def _observe_eagerly(observer: Observer, gradients: Sequence[Tensor]) -> None:
    parts = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    try:
        observer([to_array(tf.convert_to_tensor(part)) for part in parts], "")
    except MpistratError as error:
        raise as_tf_error(error) from error


def label_of(variable: Variable) -> str:
    """The user's name of a variable: its Keras path, or its name."""
    return str(getattr(variable, "path", None) or getattr(variable, "name", variable))
