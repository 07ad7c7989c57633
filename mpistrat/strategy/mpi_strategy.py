"""MPIStrategy: tf.distribute's synchronous training with one replica per rank.

For users; each method says whether it is collective.
"""

import logging
from collections.abc import Callable, Sequence

import tensorflow as tf

from ..api import array_ops, common, runtime
from ..core.errors import InvalidRequestError, MismatchError
from ..core.topology import describe_by_rank
from ..tensorflow.bridge import names
from ..tensorflow.bridge.types import Structure, TensorLike
from ..tensorflow.compression import Compression, Compressor
from ..tensorflow.gradients import GradientGroups, GradientOptions
from ..tensorflow.pin_gpu import pin_by_default
from . import checkpoints
from .extended import RankExtended
from .options import CommunicationOptions, agreed
from .replica_context import reduce_op_of
from .seeds import seed_alike

logger = logging.getLogger(__name__)

# Called while a strategy is made, with True if the strategy needs the integration. Each raises an error if it cannot
# adapt the installed version, and else returns the function that adapts it, which is called once the strategy exists.
# The package appends the integration of Keras, which imports this module.
integrations: list[Callable[[bool], Callable[[], None]]] = []


class MPIStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """Trains one replica per rank: variables are equal on all ranks, gradients are averaged, input is sharded.

        strategy = mpistrat.tensorflow.MPIStrategy()
        with strategy.scope():
            model = build_and_compile_model()
        model.fit(dataset_of_global_batches, epochs=3)

    The strategy needs no TF_CONFIG: mpirun defines the ranks, and plain `python` is one rank. MPIStrategy is a subclass
    of MultiWorkerMirroredStrategy only because Keras checks for that class, and uses none of its code. The constructor
    is collective, and calls mpistrat.init() unless the script has called it. It sets TensorFlow's seed on all ranks to
    the seed of rank 0, or to a random seed if rank 0 has none, so that all ranks shuffle in the same order.

    Differences from TensorFlow's strategies: a rank has one replica, so `run` returns tensors instead of PerReplica;
    `reduce` takes nested values, and ignores an axis for scalars; rank 0 writes files (models, checkpoints, and files
    of Keras' callbacks), in calls that all ranks make; optimizers and tapes must not be wrapped in
    DistributedOptimizer and DistributedGradientTape. The docstrings of inherited methods are TensorFlow's; the API
    reference says which of these methods are collective, and what they do here.

    Several threads of a rank may use the strategy at the same time, for example to read a metric. The ranks must be
    able to distinguish the threads: by the name that was given to the thread, or else by the function that it runs. Two
    threads that the ranks cannot distinguish are an error.

    Args:
        communication_options: tf.distribute.experimental.CommunicationOptions, the same on all ranks. `bytes_per_pack`
            is the size of the buckets in which the tensors of one call are reduced; default: 16 MiB, with several hosts
            4 MiB, and on a GPU 32 MiB. `timeout_seconds` is the time after which a collective that only some ranks have
            called ends the job; it replaces MPISTRAT_STALL_SHUTDOWN_TIME_SECONDS. For `implementation`, NCCL logs a
            warning where NCCL is not available; RING and AUTO have no effect.
        device: The device of variables and computation, for example "GPU:0". The default is the GPU that pin_gpu()
            assigns to this rank, or the CPU. The constructor calls pin_gpu() under the same conditions as init().
        random_per_rank: Whether Keras' layers (Dropout, augmentation) draw different numbers on each rank, as a single
            process does for each row of the global batch.
        variables: "mirrored", or "sharded" or "central" to save memory. In all three modes every rank has the model's
            variables, and the variables that you make in the scope. "sharded" divides the slots of Keras' optimizers
            and the work of the update among the ranks, like ShardedOptimizer: gradients are reduce-scattered, each rank
            updates its part of the weights and has the slots for that part, and the new weights are all-gathered. A
            step sends as many bytes as with "mirrored". On one host SGD and Adam give bit for bit the weights of
            "mirrored", unless XLA compiles the steps. Norms (clipping) and accumulated gradients, which are reduced in
            every pass, differ by rounding. Optimizers need an update_step, and must be made in the scope or not built
            before. `optimizer.variables` has only variables that all ranks have, such as the counter of steps. Files
            and checkpoints are those of "mirrored", for any number of ranks: saving gathers the slots on the rank that
            writes. "central" works like "sharded", but rank 0 has all slots and makes the whole update. Gradients are
            all-reduced, and rank 0 broadcasts the new weights, so a step sends more than with "mirrored".
        compression: One of Compression, for the gradients that a Keras optimizer applies.
        sparse_as_dense: Convert tf.IndexedSlices among these gradients to dense tensors first.
        groups: The number of groups, of about equal numbers of gradients, that are reduced together; default: all
            gradients together. (DistributedOptimizer also takes lists of variables, but no variables exist yet when the
            strategy is made.)

    Raises:
        InvalidRequestError: `variables` or `groups` is invalid; on this rank, before anything is sent.
        MissingDependencyError: This version of TensorFlow or Keras is not supported, or `variables` is not
            "mirrored" and tf.keras is Keras 2 or Keras 3 is missing; on this rank, before anything is sent.
        MismatchError: The ranks disagree on `variables`, `compression`, `sparse_as_dense` or `groups`; on every rank.
    """

    is_mpi_strategy = True  # mpistrat.keras, which this package imports, knows the class by this attribute

    def __init__(self, communication_options: CommunicationOptions | None = None, device: str | None = None,
                 random_per_rank: bool = True, variables: str = "mirrored",
                 compression: type[Compressor] = Compression.none, sparse_as_dense: bool = False,
                 groups: int | None = None):
        """Connect the ranks and agree on the options. Collective. The class describes the arguments and errors."""
        if variables not in ("mirrored", "central", "sharded"):
            raise InvalidRequestError(f'variables must be "mirrored", "central" or "sharded". Received: {variables!r}')
        if groups is not None and not isinstance(groups, int):
            raise InvalidRequestError(f"MPIStrategy(groups=) must be a number. Received: {groups!r}")
        gradient_options = GradientOptions(compression, sparse_as_dense, GradientGroups(groups))
        adaptations = [integration(variables != "mirrored") for integration in integrations]
        runtime.init()
        options = agreed(communication_options)
        _require_equal({"variables": variables, "compression": compression.__name__,
                        "sparse_as_dense": sparse_as_dense, "groups": groups})
        extended = RankExtended(self, _full_name(device or _default_device()), options, random_per_rank,
                                variables, gradient_options)
        # Not the constructor of MultiWorkerMirroredStrategy, which would read TF_CONFIG and start a server.
        tf.distribute.Strategy.__init__(self, extended)
        seed_alike()
        checkpoints.patch()
        for adapt in adaptations:
            adapt()

    def __repr__(self) -> str:
        # TensorFlow shows this in errors, and an error with the same text on several ranks is printed once.
        return f"<MPIStrategy of {common.size()} ranks>" if runtime.is_initialized() else "<MPIStrategy>"

    def reduce(self, reduce_op: tf.distribute.ReduceOp | str, value: Structure,
               axis: int | Sequence[int] | None = None) -> Structure:
        """Reduce over the replicas, after reducing each value over `axis`. Collective.

        Like tf.distribute.Strategy.reduce, with two differences: `value` may be nested, and is reduced in one
        collective; and scalars ignore `axis`, because Keras passes an axis for the logs of a step.

        Args:
            reduce_op: SUM or MEAN. With an axis, MEAN is the mean over all rows of all replicas.
            value: The result of `run`, on all ranks.
            axis: A number, a list of numbers, or None.
        """
        op = reduce_op_of(reduce_op)
        if axis is None:
            return super().reduce(op, value, None)
        flat = [self.extended.local(v) for v in tf.nest.flatten(value)]
        flat = [v if isinstance(v, float | int) else tf.convert_to_tensor(v) for v in flat]
        sums = [tf.reduce_sum(v, axis) if _has_axes(v) else v for v in flat]
        counts = [] if op == tf.distribute.ReduceOp.SUM else [
            tf.reduce_prod(tf.gather(tf.shape(v, tf.int64), tf.math.floormod(axis, tf.rank(v))))
            if _has_axes(v) else tf.constant(1, tf.int64) for v in flat]
        total = super().reduce(tf.distribute.ReduceOp.SUM, [*sums, *counts], None)
        if counts:
            total = [tf.math.truediv(numerator, tf.cast(denominator, numerator.dtype))
                     for numerator, denominator in zip(total[:len(sums)], total[len(sums):], strict=True)]
        return tf.nest.pack_sequence_as(value, total)


def _require_equal(arguments: dict[str, object]) -> None:
    """Raise MismatchError on every rank unless all ranks have the same constructor arguments. Collective."""
    of_ranks = array_ops.allgather_object(arguments, names.eager("strategy/arguments"))
    for name in arguments:
        values = [other[name] for other in of_ranks]
        if len(set(values)) > 1:
            raise MismatchError(f"the ranks disagree on MPIStrategy({name}=): {describe_by_rank(values)}.")


def _has_axes(value: TensorLike) -> bool:
    return isinstance(value, tf.Tensor) and value.shape.rank != 0


def _full_name(device: str) -> str:
    """The full name of a device, such as "/job:localhost/replica:0/task:0/device:CPU:0" for "CPU:0"."""
    name, = tf.distribute.OneDeviceStrategy(device).extended.worker_devices
    return name


def _default_device() -> str:
    """Return this rank's GPU, or the CPU. TensorFlow sees only that GPU, unless the process has decided otherwise."""
    try:
        pin_by_default()
    except InvalidRequestError as error:
        logger.warning("rank %d: every rank of this host may take memory on all of its GPUs: %s", common.rank(), error)
    gpus = tf.config.list_logical_devices("GPU")
    return gpus[common.local_rank() % len(gpus)].name if gpus else "/device:CPU:0"
