"""Reduces lists of gradients (dense, tf.IndexedSlices or None) of optimizers, tapes and strategies. Collective."""

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from types import MappingProxyType
from typing import Any, Protocol

import tensorflow as tf

from ..api.process_sets import ProcessSet, global_process_set, resolved
from ..api.runtime import waits_between
from ..core.errors import InvalidRequestError, MissingDependencyError, MpistratError
from ..core.request import Average, Max, Min, ReduceOp, ScaledOp, Sum, resolve_op
from ..process import step_timer
from ..process.step_timer import StepTimer
from . import consistency
from .async_op.submission import Observer
from .bridge import names
from .bridge.arguments import checked
from .bridge.private_names import AtomicFunction
from .bridge.program_order import HOST, session_graph
from .bridge.tf_errors import as_tf_error
from .bridge.types import OptionalGradient, Structure, Tensor, Variable
from .compression import Compression, Compressor, require_compression
from .consistency import FirstSteps, ReadingObserver
from .graph.buckets import ReduceSpec
from .graph.cpu import to_array
from .kerases import IdentitySet, label_of
from .list_ops import number_of, place_in, reduce_dense, reduce_tensors
from .xla import context as xla

logger = logging.getLogger(__name__)

Groups = int | list[list[Variable]] | None
_IS_LOCAL = "_mpistrat_is_local"
_warned: list[bool] = []  # Whether the warning of another strategy was logged.


class GradientGroups:
    """Divides lists of gradients into groups that are reduced together.

    Args:
        groups: A number: that many groups, of about equal numbers of gradients, in order. Lists of variables: a group
            for the gradients of each list, and one group for the gradients of all other variables. None: one group.
        num_groups: Deprecated form of `groups` as a number; 0 means None.

    Raises:
        InvalidRequestError: `groups` is neither None, a positive number nor a list of lists of variables.
    """

    def __init__(self, groups: Groups = None, num_groups: int = 0):
        is_valid = (groups is None and num_groups >= 0) or (isinstance(groups, int) and groups > 0) or (
            isinstance(groups, list | tuple) and all(isinstance(group, list | tuple) for group in groups))
        if not is_valid:
            raise InvalidRequestError("groups should be a positive integer or a list of lists of variables. "
                                      f"Received: groups={groups!r}, num_groups={num_groups!r}")
        self._count = groups if isinstance(groups, int) else num_groups
        self._sets = [] if groups is None or isinstance(groups, int) else [IdentitySet(group) for group in groups]

    @property
    def has_lists(self) -> bool:
        return bool(self._sets)

    @property
    def is_one(self) -> bool:
        """Whether all gradients are one group."""
        return not self._sets and self._count <= 1

    def divide(self, variables: Sequence[object]) -> list[list[int]]:
        """Return the indices of the variables in each group, without empty groups. Local."""
        indices = range(len(variables))
        if not self._sets:
            count = min(max(self._count, 1), len(indices))
            return [list(indices[len(indices) * k // count:len(indices) * (k + 1) // count]) for k in range(count)]
        numbers = [next((n for n, group in enumerate(self._sets) if variable in group), len(self._sets))
                   for variable in variables]
        return [[index for index in indices if numbers[index] == number] for number in sorted(set(numbers))]


@dataclass(frozen=True)
class GradientOptions:
    """How to reduce gradients: the compression, the treatment of tf.IndexedSlices, and the groups."""

    compression: type[Compressor] = Compression.none  # One of Compression.
    sparse_as_dense: bool = False  # Whether to convert tf.IndexedSlices to dense tensors first.
    groups: GradientGroups = field(default_factory=GradientGroups)  # Which gradients are reduced together.

    def __post_init__(self) -> None:
        """Raise InvalidRequestError if `compression` is not a compressor."""
        require_compression(self.compression)


def reduce_gradients(gradients: Sequence[Tensor], spec: ReduceSpec, options: GradientOptions,
                     variables: Sequence[Variable] = (),
                     exact: Mapping[str, tf.Tensor] = MappingProxyType({})) -> list[Tensor]:
    """Return the reduced gradients, followed by the reduced tensors of `exact`. Collective.

    Args:
        gradients: Dense tensors or tf.IndexedSlices; no None. At least one if `exact` is not empty.
        spec: How to reduce. In a graph, spec.observer is called only with the gradients of the first collective.
        variables: The variables of the gradients, for groups that are lists of variables.
        exact: As in list_ops.reduce_tensors. They are reduced together with the group that is reduced last.
    """
    # XLA adds the rows of slices on a GPU by atomic additions, in another order on each rank, unless ours are the last.
    is_dense = options.sparse_as_dense or (tf.IndexedSlices in map(type, gradients) and xla.device_here() != HOST)
    results: list[Tensor] = list(map(tf.convert_to_tensor, gradients) if is_dense else gradients)
    spec = observed_eagerly(results, spec)
    groups = options.groups.divide(variables or range(len(results)))
    # The last group first: that is the order in which the backward pass computes gradients.
    for group, members in reversed(list(enumerate(groups))):
        of_group = spec.of(members, name=spec.name if len(groups) == 1 else f"{spec.name}/group{group}")
        reduced = reduce_tensors([results[i] for i in members], of_group, options.compression, {} if group else exact)
        spec = replace(spec, observer=None)  # It is called once in each step.
        for i, gradient in zip(members, reduced, strict=False):
            results[i] = gradient
        if group == 0:
            results += reduced[len(members):]
    return results


class GradientReducer:
    """Averages (or sums) lists of gradients over the ranks. In a job of one rank gradients do not change.

    `optimizer`: The name of the optimizer whose gradients are reduced; None for the gradients of a tape. The
    arguments after `options` are those of DistributedGradientTape.
    """

    changes_early = False  # Whether the optimizer may change a variable before its gradient is reduced (weight decay).
    checks_weights = True  # Whether the first reductions compare the weights of the ranks.
    is_global = False  # Whether the script's batches are those of all ranks together.

    def __init__(self, optimizer: names.OptimizerName | None, options: GradientOptions, op: ReduceOp,
                 gradient_predivide_factor: float = 1.0, scale_local_gradients: bool = True,
                 process_set: ProcessSet = global_process_set):
        op = resolve_op(op, None)
        self.process_set = resolved(process_set)
        if gradient_predivide_factor != 1.0 and op is not Average:
            raise InvalidRequestError("gradient_predivide_factor not supported with op != Average")
        if gradient_predivide_factor <= 0:
            raise InvalidRequestError(f"gradient_predivide_factor must be > 0. Received: {gradient_predivide_factor}")
        self.optimizer = optimizer
        self._options = options
        self._scaled = ScaledOp(op, 1.0 / gradient_predivide_factor, gradient_predivide_factor)
        self._scale_local = scale_local_gradients
        self._local: IdentitySet[Variable] = IdentitySet()

    @cached_property
    def name(self) -> str:
        """The name of the optimizer; "tape" for a tape."""
        return "tape" if self.optimizer is None else self.optimizer()

    @cached_property
    def checks(self) -> FirstSteps | None:
        """The checks of this optimizer's first reductions; None for a tape, which uses consistency.of_tapes."""
        return None if self.optimizer is None else FirstSteps(self.name, self.process_set)

    def register_local(self, variable: Variable) -> None:
        """Exclude this variable's gradients from the reduction."""
        self._local.add(variable)
        setattr(variable, _IS_LOCAL, True)  # A tape may have been deleted when an elastic state asks.

    @property
    def has_local(self) -> bool:
        return len(self._local) > 0

    def is_local(self, variable: Variable) -> bool:
        return variable in self._local

    def reduce(self, gradients: Sequence[OptionalGradient], variables: Sequence[Variable],
               reduce_shared: Callable[..., list[Tensor]] = reduce_gradients) -> list[OptionalGradient]:
        """Return the reduced gradients of `variables`. Collective. A gradient that is None stays None.

        The gradients of local variables are not reduced. For a variable with overwrite_with_gradient, the result is the
        largest value of all ranks. `reduce_shared`: The function that reduces all other gradients.

        Raises:
            InvalidRequestError: In a replica of MPIStrategy, which reduces gradients itself.
            MismatchError: On every rank, if the ranks train different weights.
        """
        self.require_no_strategy()
        count_step(self.is_global)
        if not self.process_set.has_others():
            return list(gradients)
        warn_of_strategy(self.process_set)
        overwritten = indices_of(variables)
        results = self.reduce_overwritten(gradients, variables, overwritten) if overwritten else list(gradients)
        number = self.process_set.process_set_id or 0
        shared: list[int] = []
        for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if gradient is None or i in overwritten:
                continue
            if variable in self._local:
                results[i] = self._local_gradient(gradient, number)
                continue
            shared.append(i)
        trained = [variables[i] for i in shared]
        labels = list(map(label_of, trained))
        observer = self._observer(number, trained, labels)
        # Gradients of a tape may be differentiated; those of an optimizer are applied.
        spec = ReduceSpec(self._name_of(self.name), self._scaled, labels, shared, number, observer=observer,
                          has_gradient=self.optimizer is None)
        reduced = reduce_shared([results[i] for i in shared], spec, self._options, trained)
        for i, gradient in zip(shared, reduced, strict=True):
            results[i] = gradient
        return results

    def reduce_overwritten(self, gradients: Sequence[OptionalGradient], variables: Sequence[Variable],
                           indices: Sequence[int]) -> list[OptionalGradient]:
        """Return `gradients` in which those at `indices` are replaced by the largest values of all ranks.

        `indices`: indices_of(variables). None and local gradients are not replaced. Collective if any is replaced.
        """
        results = list(gradients)
        present = [i for i in indices if variables[i] not in self._local and gradients[i] is not None]
        if present and self.process_set.has_others():
            number = self.process_set.process_set_id or 0
            largest = reduce_dense([tf.convert_to_tensor(gradients[i]) for i in present], ReduceSpec(
                self._name_of(f"{self.name}/overwritten"), ScaledOp(Max), [label_of(variables[i]) for i in present],
                process_set=number, has_gradient=self.optimizer is None))
            for i, value in zip(present, largest, strict=True):
                results[i] = value
        return results

    def _name_of(self, purpose: str) -> str:
        """Return a name for a collective of this reducer; in a graph a new name at each call."""
        number = self.process_set.process_set_id or 0
        return names.made(purpose, number) if self.optimizer is None else names.of(purpose, number)

    def require_no_strategy(self) -> None:
        if _is_under_mpi_strategy():
            raise InvalidRequestError("a DistributedOptimizer or DistributedGradientTape under MPIStrategy would "
                                      "average gradients twice. Use the plain optimizer or tf.GradientTape.")

    def all_true(self, value: tf.Tensor, purpose: str) -> tf.Tensor:
        """Return whether a boolean scalar is true on every rank of the process set. Collective."""
        if not self.process_set.has_others():
            return value
        number = number_of(self.process_set, self.name)
        spec = ReduceSpec(names.of(f"{self.name}/{purpose}", number), ScaledOp(Min), process_set=number)
        return tf.cast(reduce_dense([tf.cast(value, tf.int32)], spec)[0], tf.bool)

    def sum(self, values: tf.Tensor, purpose: str) -> tf.Tensor:
        """Return the sum of a tensor over the ranks of the process set. Collective."""
        number = number_of(self.process_set, self.name)
        spec = ReduceSpec(names.of(f"{self.name}/{purpose}", number), ScaledOp(Sum), process_set=number)
        return reduce_dense([values], spec)[0]

    def _observer(self, process_set: int, sources: Sequence[Variable], labels: Sequence[str]) -> Observer | None:
        """Return the function that checks gradients of `sources` before they are reduced; None if there is no check."""
        if self.checks is not None and self.checks.is_done:
            return None
        variables = [source for source in sources if hasattr(source, "assign")]  # A tape has tensors as sources too.
        if not variables:
            return None
        checks = self.checks or consistency.of_tapes(
            names.eager(self.name, process_set) if tf.executing_eagerly() else self.name, self.process_set)
        # In a graph nothing orders a change of a variable that does not depend on its gradient, such as weight decay,
        # after the callback that reads the variable. What follows on a tape is not known here. While a function runs
        # that XLA has compiled, TensorFlow locks the variables that it changes.
        may_read = self.checks_weights and (tf.executing_eagerly() or (
            self.checks is not None and not self.changes_early and not xla.is_compiled()))
        if may_read and not tf.executing_eagerly():
            variables = consistency.read_alone(variables, self.name)
        label_by_id = dict(zip(map(id, sources), labels, strict=True))
        observer = checks.observer(variables, [label_by_id[id(v)] for v in variables], may_read)
        if observer is None or not may_read or session_graph() is None:
            return observer
        digests: list[bytes] = []
        checks.digests_of = lambda _: digests
        return ReadingObserver(observer, digests, variables)

    def _local_gradient(self, gradient: Tensor, process_set: int) -> Tensor:
        if not self._scale_local:
            return gradient
        size = tf.cast(place_in(process_set)[1], gradient.dtype)
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(gradient.values / size, gradient.indices, gradient.dense_shape)
        return gradient / size


def observed_eagerly(gradients: Sequence[Tensor], spec: ReduceSpec) -> ReduceSpec:
    """In eager code, call spec.observer, and return a spec without observer. In a graph, return `spec` unchanged."""
    if spec.observer is None or not tf.executing_eagerly():
        return spec
    parts = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    try:
        spec.observer([to_array(tf.convert_to_tensor(part)) for part in parts], "")
    except MpistratError as error:
        raise as_tf_error(error) from error
    return replace(spec, observer=None)


def _is_under_mpi_strategy() -> bool:
    return getattr(tf.distribute.get_strategy().extended, "averages_gradients", False)


def warn_of_strategy(process_set: ProcessSet) -> None:
    """Warn once, on the first rank, if the caller is in a tf.distribute strategy other than MPIStrategy. Local."""
    if not tf.distribute.has_strategy() or _is_under_mpi_strategy() or process_set.rank() or _warned:
        return
    _warned.append(True)
    name = type(tf.distribute.get_strategy()).__name__
    logger.warning("mpistrat: a distributed optimizer or tape averages gradients over the ranks inside a "
                   "tf.distribute.%s, which does not know of other ranks: the strategy divides each batch of this rank "
                   "among the devices of this process, and counts only its own steps and rows. To keep a strategy, "
                   "write strategy = mpistrat.tensorflow.MPIStrategy() instead, and leave out the distributed "
                   "optimizer or tape. To keep the optimizer or tape, leave out the strategy and its scope.", name)


def is_local_of_any(variable: Variable) -> bool:
    """Return whether a variable is registered with any optimizer or tape as local to each rank. Local."""
    # Not by hasattr, which may run a collective for a variable of a strategy.
    return any(_IS_LOCAL in getattr(each, "__dict__", ()) for each in (variable, getattr(variable, "value", None)))


class Layer(Protocol):
    """The attributes of a Keras layer that are used here."""

    built: bool
    weights: list[Any]


def register_local_layers(layers: Layer | Sequence[Layer] | None, register: Callable[[Variable], None]) -> None:
    """Call `register` with each weight of `layers`, including running statistics. Local.

    Raises InvalidRequestError: `layers` is neither a layer nor a list of layers, or a layer has no weights yet.
    """
    listed: list[Any] = list(layers) if isinstance(layers, list | tuple) else [] if layers is None else [layers]
    for layer in listed:
        if not hasattr(layer, "weights"):
            raise InvalidRequestError(f"local_layers must be a Keras layer or a list of layers. Received: {layer!r}")
        if not layer.built:
            raise InvalidRequestError(f"local_layers: the layer {getattr(layer, 'name', layer)} has no weights yet. "
                                      "Build the model first: give it an Input layer, or call it once.")
        for weight in layer.weights:
            register(weight)
            register(weight.value)  # The tf.Variable of a Keras variable; a tape may have either as a source.


# -- variables that their gradient overwrites -------------------------------------------------------------------------

# All ranks get the largest value, which is neither averaged nor scaled. The "gradient" of such a variable is not a
# gradient: a layer computes the variable's next value in its backward pass, and Keras' optimizers assign it. Keras'
# float8 keeps the largest absolute values of inputs, kernels and output gradients in variables of this kind, and the
# scales that follow from them. Keras takes the maximum where it accumulates gradients, and a process with the rows of
# all ranks would have the maximum over all rows. Keras 3.10 to 3.15 use such variables for nothing else.


def indices_of(variables: Sequence[Variable]) -> list[int]:
    """Return the indices of the variables with overwrite_with_gradient. Local."""
    return [i for i, variable in enumerate(variables) if getattr(variable, "overwrite_with_gradient", False)]


# -- steps of mpistrat run --efficiency -------------------------------------------------------------------------------

# The optimizers, the tape and the strategy count a step where they average gradients, with one rank too; see
# process/step_timer.py.


def count_step(is_global: bool) -> None:
    """Count a training step for `mpistrat run --efficiency`: now, or when the graph runs. No effect in fit. Local.

    `is_global`: Whether the script's batches are those of all ranks together.
    """
    timer = step_timer.current()
    if timer is None or timer.is_in_fit:
        return
    if tf.executing_eagerly():
        timer.end_step(1, None, is_global, waits_between)
        timer.end_script()
        return
    if session_graph() is not None:
        raise InvalidRequestError("mpistrat run --efficiency cannot count steps in the graph of a session. Leave out "
                                  "--efficiency, or put the step into a tf.function.")
    if xla.is_compiled():
        raise InvalidRequestError("mpistrat run --efficiency cannot count steps in a function that XLA compiles. Leave "
                                  "out jit_compile=True while you measure, or train with fit.")
    _end_after_calls(timer)
    tf.numpy_function(lambda: timer.end_step(1, None, is_global, waits_between), [], [])


@functools.cache
def _end_after_calls(timer: StepTimer) -> None:
    """Make every call of a graph from Python end with SystemExit once `timer` has counted its last step.

    A node of the graph cannot raise SystemExit itself, because TensorFlow would replace the exception.
    """
    call = AtomicFunction.call_flat

    @functools.wraps(call)
    def call_flat(function: AtomicFunction, *args: tf.Tensor) -> object:
        result = call(function, *args)
        if tf.executing_eagerly():
            timer.end_script()
        return result

    AtomicFunction.call_flat = call_flat


# -- DistributedGradientTape ------------------------------------------------------------------------------------------


class _DistributedGradientTape(tf.GradientTape):
    """A tape that shares the recording of another tape. `gradient` returns gradients reduced over the ranks."""

    def __init__(self, tape: tf.GradientTape, reducer: GradientReducer):
        self.__dict__ = tape.__dict__  # The same recording, whichever of the two is used.
        self._mpistrat_reducer = reducer

    def gradient(self, target: object, sources: Structure, output_gradients: object = None,
                 unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
                 use_generic_names: bool = False) -> Structure:
        """As tf.GradientTape.gradient, but gradients are averaged over the ranks. Collective. `sources` may be nested.

        `use_generic_names` is accepted for compatibility with Horovod, and ignored.
        """
        gradients = super().gradient(target, sources, output_gradients, unconnected_gradients)
        # For tf.nest, None and tf.IndexedSlices are leaves.
        flat = self._mpistrat_reducer.reduce(tf.nest.flatten(gradients), tf.nest.flatten(sources))
        if any(isinstance(each, tf.IndexedSlices) for each in flat):
            _adapt_keras("keras" in sys.modules)
        return tf.nest.pack_sequence_as(sources, flat)

    def register_local_source(self, source: Variable) -> None:
        """Exclude the gradients of this source from the averaging."""
        self._mpistrat_reducer.register_local(source)


@functools.cache
def _adapt_keras(is_imported: bool) -> None:
    """Make Keras optimizers add repeated rows of slices in a fixed order, if the program has imported Keras. Local."""
    if is_imported:
        with contextlib.suppress(MissingDependencyError):  # Keras 2, or Keras with another backend
            import_module("mpistrat.keras.bridge.patches").apply()


@checked
def DistributedGradientTape(gradtape: tf.GradientTape, device_dense: str = "", device_sparse: str = "",  # noqa: N802
                            compression: type[Compressor] = Compression.none, sparse_as_dense: bool = False,
                            op: ReduceOp = Average, gradient_predivide_factor: float = 1.0, num_groups: int = 0,
                            groups: Groups = None,
                            process_set: ProcessSet = global_process_set,
                            scale_local_gradients: bool = True, check_weights: bool = True) -> tf.GradientTape:
    """Return a tape that shares `gradtape`'s recording and averages gradients over the ranks. Arguments as in Horovod.

    All ranks must call `gradient` in the same functions and in the same order. In a tf.function, the order of tracing
    counts. The gradient of a Keras variable with overwrite_with_gradient is the largest value of all ranks, if the
    argument `sources` of `gradient` contains the Keras variable, not its tf.Variable.

    Args:
        gradtape: A tf.GradientTape, during or after its recording.
        device_dense: Accepted for compatibility with Horovod, ignored.
        device_sparse: Accepted for compatibility with Horovod, ignored.
        compression: One of Compression.
        sparse_as_dense: Convert tf.IndexedSlices to dense tensors first.
        op: Average or Sum.
        gradient_predivide_factor: Splits the division by the number of ranks N. Gradients are divided by this factor
            before the sum, and by N / factor after the sum. Average only.
        num_groups: Deprecated form of `groups`.
        groups: The gradients that are reduced together; default: all. A number makes that many groups, with about
            equal numbers of gradients. Lists of variables make one group for the gradients of each list, and one group
            for the gradients of all other variables.
        process_set: The ranks that take part. On other ranks gradients do not change.
        scale_local_gradients: Whether gradients that are excluded by `register_local_source` are divided by N.
        check_weights: Whether the first reductions check that the ranks train the same weights. Pass False if each rank
            changes its weights on purpose before it takes the gradient, as in MAML.

    Raises:
        MismatchError: From `gradient`, on every rank, if the ranks train different weights.
        ValueError: `gradtape` is already distributed, or an argument is out of range.
    """
    options = GradientOptions(compression, sparse_as_dense, GradientGroups(groups, num_groups))
    if isinstance(gradtape, _DistributedGradientTape) or hasattr(gradtape, "_mpistrat_reducer"):
        raise ValueError("gradtape is already a DistributedGradientTape. Use it directly, or pass a tf.GradientTape.")
    if not isinstance(gradtape, tf.GradientTape):
        raise InvalidRequestError("DistributedGradientTape takes the tape of `with tf.GradientTape() as tape:`. "
                                  f"Received: {gradtape!r}")
    reducer = GradientReducer(None, options, op, gradient_predivide_factor, scale_local_gradients, process_set)
    reducer.checks_weights = check_weights
    return _DistributedGradientTape(gradtape, reducer)


@checked
def PartialDistributedGradientTape(gradtape: tf.GradientTape, device_dense: str = "",  # noqa: N802
                                   device_sparse: str = "", compression: type[Compressor] = Compression.none,
                                   sparse_as_dense: bool = False, op: ReduceOp = Average,
                                   gradient_predivide_factor: float = 1.0, num_groups: int = 0, groups: Groups = None,
                                   process_set: ProcessSet = global_process_set,
                                   local_layers: Layer | Sequence[Layer] | None = None,
                                   scale_local_gradients: bool = True,
                                   check_weights: bool = True) -> tf.GradientTape:
    """As DistributedGradientTape, but gradients of `local_layers` are not averaged: each rank trains its own layers.

    Args:
        gradtape, device_dense, device_sparse, compression, sparse_as_dense, op: As for DistributedGradientTape.
        gradient_predivide_factor, num_groups, groups, process_set, scale_local_gradients, check_weights: As above.
        local_layers: A Keras layer, or a list of layers. All layers must be built.

    Raises:
        ValueError: As for DistributedGradientTape. Also if `local_layers` has an object that is not a built layer.
    """
    tape = DistributedGradientTape(gradtape, device_dense, device_sparse, compression, sparse_as_dense, op,
                                   gradient_predivide_factor, num_groups, groups, process_set, scale_local_gradients,
                                   check_weights)
    register_local_layers(local_layers, tape.register_local_source)
    return tape
