"""Horovod's elastic API for TensorFlow: states with variables.

    state = hvd.elastic.TensorFlowKerasState(model, optimizer, epoch=0)

    @hvd.elastic.run
    def train(state):
        while state.epoch < 10:
            ...
            state.epoch += 1
            state.commit()

Under `mpistrat run --elastic` the job survives the loss of ranks and hosts. `sync` is collective, and
so is `commit` in such a job.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from ..api import array_ops, missing_names, runtime
from ..api.elastic import ElasticSampler, HostsUpdatedInterrupt, ObjectState, Snapshot, run
from ..core.errors import ElasticError
from ..core.request import Average, Max, ReduceOp, ScaledOp
from .bridge.types import TensorLike, Variable
from .compression import Compression
from .consistency import require_equal_weights
from .gradients import is_local_of_any
from .graph.buckets import ReduceSpec, reduce_list
from .kerases import accumulators_among, build, variables_of
from .ops import broadcast_variables

__all__ = ["ElasticSampler", "HostsUpdatedInterrupt", "ObjectState", "TensorFlowKerasState", "TensorFlowState", "run"]

__getattr__ = missing_names.explain(__name__)


# Functions that return the states of an optimizer and of its inner optimizers that are divided among the ranks.
divided_states: list[Callable[[object], list[Any]]] = []


class TensorFlowState(ObjectState):
    """The state of a training script: variables and Python objects.

    In an elastic job every MPISTRAT_CHECK_EVERY-th commit first compares the trainable variables of all ranks, except
    variables that were registered as local to each rank. MPISTRAT_CHECK_ACTION says whether a difference is an error or
    a warning. Each commit of an elastic job also contains the error feedback of Compression.int8.

    Args:
        variables: tf.Variables or Keras variables, the same variables in the same order on all ranks.
        session: The tf.compat.v1 session that has the variables; default: the session of the `with` block, if any.
            With a session, `variables` defaults to all global variables of its graph, and commits compare nothing.
        kwargs: Python objects, see ObjectState.

    Raises:
        ValueError: There are no variables.
    """

    def __init__(self, variables: Sequence[Variable] | None = None,
                 session: tf.compat.v1.Session | None = None, **kwargs: Any):
        self._session = session or tf.compat.v1.get_default_session()
        if not variables and self._session is not None:
            with self._session.graph.as_default():
                variables = tf.compat.v1.global_variables()
        if not variables:
            raise ValueError("TensorFlowState needs a list of variables. Write "
                             "TensorFlowState([*model.variables, *optimizer.variables], epoch=0).")
        self._variables = list(variables)
        self._errors: dict[str, np.ndarray] | None = None  # Compression.error_feedback() of the last commit.
        super().__init__(**kwargs)

    def _snapshot(self) -> Snapshot:
        # The tensors share the memory of the variables. TensorFlow copies it before it updates a variable whose tensor
        # is still referred to (PrepareToUpdateVariable in core/kernels/training_op_helpers.h).
        return {**super()._snapshot(), "variables": self._values(), "errors": self._errors}

    def _values(self) -> list[tf.Tensor] | list[np.ndarray]:
        if self._session is not None:
            return list(self._session.run(self._variables))
        return [tf.convert_to_tensor(variable) for variable in self._variables]

    def _assign(self, values: Sequence[TensorLike]) -> None:
        variable: Any
        for variable, value in zip(self._variables, values, strict=True):
            if self._session is not None:
                variable.load(value, self._session)
            else:
                variable.assign(value)

    def _portable(self, snapshot: Snapshot) -> Snapshot:
        return {**snapshot, "variables": [np.asarray(tensor) for tensor in snapshot["variables"]]}

    def _take(self, snapshot: Snapshot) -> None:
        values = snapshot["variables"]
        shapes = [tuple(value.shape) for value in values]
        if shapes != [tuple(variable.shape) for variable in self._variables]:
            raise ElasticError(f"the commit has {len(values)} variables, which do not match the {len(self._variables)} "
                               "variables of this state in number or shapes. The script has changed since the commit.")
        self._assign(values)
        self._restore_errors(snapshot["errors"])
        super()._take(snapshot)

    def _restore_errors(self, errors: dict[str, np.ndarray] | None) -> None:
        # Copies: an agent's memory may get another commit.
        self._errors = errors if errors is None else {name: np.array(each) for name, each in errors.items()}
        if self._errors is not None and runtime.is_initialized():
            Compression.restore_error_feedback(self._errors)

    def _compare(self, number: int) -> bool:
        """Gather int8's error feedback; return True if any. Every MPISTRAT_CHECK_EVERY-th commit compares weights."""
        settings = runtime.current().settings
        if runtime.current().topology.size > 1:
            self._errors = Compression.error_feedback()
        if self._session is None and settings.is_checked and settings.check_every and not number % settings.check_every:
            # Running statistics and random states may differ.
            compared = [v for v in self._variables if getattr(v, "trainable", True) and not is_local_of_any(v)]
            require_equal_weights(compared, "elastic.weights", f"in commit {number}", action=settings.check_action)
        return bool(self._errors)

    def _broadcast(self, root: int) -> None:
        self._restore_errors(array_ops.broadcast_object(self._errors, root, name="elastic.errors"))
        if self._session is not None:
            self._assign(array_ops.broadcast_object(self._values(), root))
        else:
            broadcast_variables(self._variables, root)
        super()._broadcast(root)


class Averaging(Protocol):
    """A callback that averages the weights of ranks: LocalSGD or DiLoCo of mpistrat.keras.callbacks."""

    @property
    def variables(self) -> list[Any]: ...

    def prepare(self, model: Any) -> None: ...

    def before_commit(self) -> bool: ...


class TensorFlowKerasState(TensorFlowState):
    """The state of a training script: a Keras model, its optimizer, and Python objects.

    Args:
        model: A model whose weights have been created.
        optimizer: Default: the optimizer of `model.compile`. Its variables are created if they do not exist.
        backend: Accepted for compatibility with Horovod, ignored.
        averaging: The hvd.callbacks.LocalSGD or DiLoCo with which the model is trained. In an elastic job the
            callback gives all ranks the same weights before each commit. The commit contains the callback's state.
        kwargs: Python objects, see ObjectState.

    Raises:
        ValueError: The model has no weights yet.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: object = None, averaging: Averaging | None = None,
                 **kwargs: Any):
        if not model.built or not model.weights:
            raise ValueError("the model has no weights yet. Call model.build(input_shape), or add an Input layer, "
                             "before TensorFlowKerasState(model).")
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        if self.optimizer is not None:
            build(self.optimizer, model.trainable_variables)
        self._averaging = averaging
        if averaging is not None:
            averaging.prepare(model)
        super().__init__([*model.weights, *(variables_of(self.optimizer) if self.optimizer is not None else ()),
                          *(averaging.variables if averaging is not None else ())], **kwargs)

    @property
    def _divided(self) -> list[Any]:
        return [state for find in divided_states for state in find(self.optimizer)]

    def _snapshot(self) -> Snapshot:
        return {**super()._snapshot(), "divided": [state.save() for state in self._divided]}

    def _take(self, snapshot: Snapshot) -> None:
        super()._take(snapshot)
        for state, saved in zip(self._divided, snapshot["divided"], strict=True):
            state.load(saved)

    def _broadcast(self, root: int) -> None:
        super()._broadcast(root)
        for state in self._divided:
            state.share(root)

    def _needs_new_processes(self) -> str:
        return "only new processes can divide the state of the sharded optimizer anew" if self._divided else ""

    def _compare(self, number: int) -> bool:
        """As TensorFlowState._compare; also average accumulated gradients, and gather the state of a sharded optimizer.

        Each rank has accumulated gradients of its own rows, but new processes get the gradients of a single rank.
        Averaging does not change the next update. The gathered state has the parts of ranks that may be lost later.
        """
        has_changed = self._averaging is not None and self._averaging.before_commit()
        has_changed = super()._compare(number) or has_changed
        for state in self._divided:
            state.consolidate(to=None)
            has_changed = True
        if runtime.current().topology.size == 1:
            return has_changed
        found: dict[ReduceOp, list[Any]] = {}
        for weight, variable in accumulators_among(self._variables, self.model.trainable_variables):
            if not is_local_of_any(weight):
                # For such a weight Keras accumulates the largest gradient.
                op = Max if getattr(weight, "overwrite_with_gradient", False) else Average
                found.setdefault(op, []).append(variable)
        for op, waiting in found.items():
            spec = ReduceSpec(f"elastic.waiting/{op.name}", ScaledOp(op))
            reduced = reduce_list(list(map(tf.convert_to_tensor, waiting)), spec)
            for variable, value in zip(waiting, reduced, strict=True):
                variable.assign(value)
            has_changed = True
        return has_changed
