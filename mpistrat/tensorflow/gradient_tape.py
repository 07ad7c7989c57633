"""DistributedGradientTape: a tf.GradientTape whose gradients are averaged over the ranks.

For users; `gradient` is collective.
"""

import contextlib
import functools
import sys
from collections.abc import Sequence
from importlib import import_module

import tensorflow as tf

from ..api.process_sets import ProcessSet, global_process_set
from ..core.errors import MissingDependencyError
from ..core.request import Average, ReduceOp
from .bridge.types import Structure, Variable
from .compression import Compression, Compressor
from .gradients import GradientGroups, GradientOptions, GradientReducer, Groups, Layer, register_local_layers


class _DistributedGradientTape(tf.GradientTape):
    """Shares the state of the tape it was made from; `gradient` returns reduced gradients."""

    def __init__(self, tape: tf.GradientTape, reducer: GradientReducer):
        self.__dict__ = tape.__dict__  # The same recording, whichever of the two is used.
        self._mpistrat_reducer = reducer

    def gradient(self, target: object, sources: Structure, output_gradients: object = None,
                 unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
                 use_generic_names: bool = False) -> Structure:
        """As tf.GradientTape.gradient, but gradients are averaged over the ranks. Collective. `sources` may be nested.

        `use_generic_names` is accepted for compatibility with Horovod, ignored: the names of collectives are numbers.
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


def DistributedGradientTape(gradtape: tf.GradientTape, device_dense: str = "", device_sparse: str = "",  # noqa: N802
                            compression: type[Compressor] = Compression.none, sparse_as_dense: bool = False,
                            op: ReduceOp = Average, gradient_predivide_factor: float = 1.0, num_groups: int = 0,
                            groups: Groups = None,
                            process_set: ProcessSet = global_process_set,
                            scale_local_gradients: bool = True, check_weights: bool = True) -> tf.GradientTape:
    """Return a tape that shares the recording of `gradtape` and averages gradients over the ranks. Horovod's signature.

    All ranks must call `gradient` in the same places of the program (in a tf.function: while it is traced). A Keras
    variable with overwrite_with_gradient gets the largest value of all ranks, if the source is the Keras variable
    itself and not the tf.Variable in it.

    Args:
        gradtape: A tf.GradientTape, during or after its recording.
        device_dense: Accepted for compatibility with Horovod, ignored.
        device_sparse: Accepted for compatibility with Horovod, ignored.
        compression: One of Compression.
        sparse_as_dense: Convert tf.IndexedSlices to dense tensors first.
        op: Average or Sum.
        gradient_predivide_factor: Splits the division by the number of ranks N: by this factor before the sum, and by
            N / factor after it. Average only.
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
    reducer = GradientReducer(None, options, op, gradient_predivide_factor, scale_local_gradients, process_set)
    reducer.checks_weights = check_weights
    return _DistributedGradientTape(gradtape, reducer)


def PartialDistributedGradientTape(gradtape: tf.GradientTape, device_dense: str = "",  # noqa: N802
                                   device_sparse: str = "", compression: type[Compressor] = Compression.none,
                                   sparse_as_dense: bool = False, op: ReduceOp = Average,
                                   gradient_predivide_factor: float = 1.0, num_groups: int = 0, groups: Groups = None,
                                   process_set: ProcessSet = global_process_set,
                                   local_layers: Layer | Sequence[Layer] | None = None,
                                   scale_local_gradients: bool = True,
                                   check_weights: bool = True) -> tf.GradientTape:
    """As DistributedGradientTape, but without averaging the gradients of `local_layers`, which each rank trains alone.

    Args:
        gradtape, device_dense, device_sparse, compression, sparse_as_dense, op: As for DistributedGradientTape.
        gradient_predivide_factor, num_groups, groups, process_set, scale_local_gradients, check_weights: As above.
        local_layers: A Keras layer, or a list of layers. All layers must be built.

    Raises:
        ValueError: As DistributedGradientTape. Also if `local_layers` has an object that is not a built layer.
    """
    tape = DistributedGradientTape(gradtape, device_dense, device_sparse, compression, sparse_as_dense, op,
                                   gradient_predivide_factor, num_groups, groups, process_set, scale_local_gradients,
                                   check_weights)
    register_local_layers(local_layers, tape.register_local_source)
    return tape
