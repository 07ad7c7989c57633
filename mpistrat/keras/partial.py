"""PartialDistributedOptimizer: a DistributedOptimizer that leaves the gradients of some layers to each rank.

It registers the weights of these layers as local variables of a DistributedOptimizer. For users; local.
"""

from collections.abc import Sequence

from keras.optimizers import Optimizer

from ..api.process_sets import ProcessSet, global_process_set
from ..core.request import Average, ReduceOp
from ..tensorflow.compression import Compression, Compressor
from ..tensorflow.gradients import Groups, Layer, register_local_layers
from .optimizer import DistributedOptimizer


def PartialDistributedOptimizer(optimizer: Optimizer, name: str | None = None,  # noqa: N802
                                device_dense: str = "", device_sparse: str = "",
                                compression: type[Compressor] = Compression.none, sparse_as_dense: bool = False,
                                gradient_predivide_factor: float = 1.0, op: ReduceOp = Average,
                                backward_passes_per_step: int = 1, average_aggregated_gradients: bool = False,
                                groups: Groups = None, process_set: ProcessSet = global_process_set,
                                local_layers: Layer | Sequence[Layer] | None = None,
                                scale_local_gradients: bool = True, uneven: str = "error",
                                average_statistics: bool = True, check_weights: bool = True) -> Optimizer:
    """As DistributedOptimizer, but some layers are each rank's own: fit averages neither gradients nor statistics.

    Pass the weights of these layers to BroadcastGlobalVariablesCallback(local_variables=...) too, if each rank is to
    start with its own.

    Args:
        optimizer, name, device_dense, device_sparse, compression, sparse_as_dense: As for DistributedOptimizer.
        gradient_predivide_factor, op, backward_passes_per_step, average_aggregated_gradients: Likewise.
        groups, process_set, scale_local_gradients, uneven, average_statistics, check_weights: Likewise.
        local_layers: A Keras layer or a list of layers, which have their weights.

    Raises:
        ValueError: As DistributedOptimizer, or `local_layers` is something else, or has no weights yet.
    """
    distributed = DistributedOptimizer(
        optimizer, name, device_dense, device_sparse, compression, sparse_as_dense, gradient_predivide_factor, op,
        backward_passes_per_step, average_aggregated_gradients, groups=groups, process_set=process_set,
        scale_local_gradients=scale_local_gradients, average_statistics=average_statistics, uneven=uneven,
        check_weights=check_weights)
    register_local_layers(local_layers, distributed.register_local_var)
    return distributed
