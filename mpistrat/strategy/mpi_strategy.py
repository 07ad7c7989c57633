"""The public MPIStrategy (tf.distribute's synchronous training with one replica per rank) and strategy(name)."""

import functools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from ..api import array_ops, common, runtime
from ..cluster import MPIClusterResolver
from ..core.errors import InvalidRequestError, MismatchError
from ..core.topology import describe_by_rank
from ..tensorflow.bridge import names
from ..tensorflow.bridge.arguments import checked
from ..tensorflow.bridge.types import Structure, TensorLike
from ..tensorflow.compression import Compression, Compressor
from ..tensorflow.gradients import GradientGroups, GradientOptions
from ..tensorflow.pin_gpu import pin_by_default
from . import checkpoints
from .extended import CommunicationOptions, RankExtended, apply_timeout, reduce_op_of
from .input import seed_alike

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
    of MultiWorkerMirroredStrategy only because Keras checks for this class. The code of the superclass is not used. The
    constructor is collective, and calls mpistrat.init() unless the script has called it. It sets TensorFlow's seed on
    all ranks to the seed of rank 0, or to a random seed if rank 0 has none, so all ranks shuffle in the same order.

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
            called ends the job; it replaces MPISTRAT_STALL_SHUTDOWN_TIME_SECONDS. `implementation` has no effect, but
            the value NCCL causes a warning if NCCL is not available.
        device: The device of variables and computation, for example "GPU:0". The default is the GPU that pin_gpu()
            assigns to this rank, or the CPU. The constructor calls pin_gpu() under the same conditions as init().
        random_per_rank: Whether Keras' layers (Dropout, augmentation) draw different numbers on each rank, as a single
            process does for each row of the global batch.
        variables: "mirrored", or "sharded" or "central" to save memory. In all three modes every rank has the model's
            variables, and the variables that you make in the scope. "sharded" divides the slots (momenta and so on) of
            Keras' optimizers and the work of the update, like ShardedOptimizer: gradients are reduce-scattered, each
            rank updates a part of the weights and has the slots for it, and the new weights are all-gathered. A
            step sends as many bytes as with "mirrored". On one host SGD and Adam give bit for bit the weights of
            "mirrored", unless XLA compiles the steps. With accumulation, each backward pass reduces its gradients.
            Accumulation and clipping by norm make weights differ from "mirrored" by rounding. An optimizer must have
            the method update_step. An optimizer from outside the scope must not be built yet. `optimizer.variables` has
            only variables that all ranks have, such as the step counter. Files and checkpoints are as with "mirrored",
            for any number of ranks: the rank that writes gathers the slots. "central" works like "sharded", but rank 0
            has all slots and does the whole update. Gradients are all-reduced and weights broadcast: a step sends more.
        compression: One of Compression, for the gradients that a Keras optimizer applies.
        sparse_as_dense: Convert tf.IndexedSlices to dense tensors before an optimizer's gradients are reduced.
        groups: The number of groups into which an optimizer's gradients are divided about evenly. The gradients of a
            group are reduced together. Default: one group. (Lists of variables, as for DistributedOptimizer, are not
            possible, because no variables exist yet when the strategy is made.)

    Raises:
        InvalidRequestError: `variables` or `groups` is invalid; on this rank, before anything is sent.
        MissingDependencyError: This version of TensorFlow or Keras is not supported; or, with "sharded" and "central",
            Keras 3 is missing, or tf.keras is Keras 2. On this rank, before anything is sent.
        MismatchError: The ranks disagree on `variables`, `compression`, `sparse_as_dense` or `groups`; on every rank.
    """

    is_mpi_strategy = True  # mpistrat.keras, which this package imports, knows the class by this attribute

    @checked
    def __init__(self, communication_options: CommunicationOptions | None = None, device: str | None = None,
                 random_per_rank: bool = True, variables: str = "mirrored",
                 compression: type[Compressor] = Compression.none, sparse_as_dense: bool = False,
                 groups: int | None = None):
        """Connect the ranks and agree on the options. Collective. The class describes the arguments and errors."""
        if variables not in ("mirrored", "central", "sharded"):
            raise InvalidRequestError(f'variables must be "mirrored", "central" or "sharded". Received: {variables!r}')
        gradient_options = GradientOptions(compression, sparse_as_dense, GradientGroups(groups))
        adaptations = [integration(variables != "mirrored") for integration in integrations]
        runtime.init()
        options = _agreed(communication_options)
        _require_equal({"variables": variables, "compression": compression.__name__,
                        "sparse_as_dense": sparse_as_dense, "groups": groups})
        # The full name of the device, such as "/job:localhost/replica:0/task:0/device:CPU:0" for "CPU:0".
        device, = tf.distribute.OneDeviceStrategy(device or _default_device()).extended.worker_devices
        extended = RankExtended(self, device, options, random_per_rank, variables, gradient_options)
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

        This differs from tf.distribute.Strategy.reduce in two ways. `value` may be nested, and is reduced in one
        collective. For scalars `axis` is ignored, because Keras passes an axis for the logs of a step.

        Args:
            reduce_op: SUM or MEAN. With an axis, MEAN is the mean over all rows of all replicas.
            value: The result of `run`, on all ranks.
            axis: A number, a list of numbers, or None.
        """
        op = reduce_op_of(reduce_op)
        if axis is None:
            return super().reduce(op, value, None)
        def has_axes(value: TensorLike) -> bool:
            return isinstance(value, tf.Tensor) and value.shape.rank != 0

        flat = [self.extended.local(v) for v in tf.nest.flatten(value)]
        flat = [v if isinstance(v, float | int) else tf.convert_to_tensor(v) for v in flat]
        sums = [tf.reduce_sum(v, axis) if has_axes(v) else v for v in flat]
        counts = [] if op == tf.distribute.ReduceOp.SUM else [
            tf.reduce_prod(tf.gather(tf.shape(v, tf.int64), tf.math.floormod(axis, tf.rank(v))))
            if has_axes(v) else tf.constant(1, tf.int64) for v in flat]
        total = super().reduce(tf.distribute.ReduceOp.SUM, [*sums, *counts], None)
        if counts:
            total = [tf.math.truediv(numerator, tf.cast(denominator, numerator.dtype))
                     for numerator, denominator in zip(total[:len(sums)], total[len(sums):], strict=True)]
        return tf.nest.pack_sequence_as(value, total)


def _agreed(options: CommunicationOptions | None) -> CommunicationOptions:
    """Check that the ranks' options are equal, apply them to the engine, and return them (None: defaults). Collective.

    Raises ValueError: On this rank if `options` are of another class; on every rank if the ranks' options differ.
    """
    if options is not None and not hasattr(options, "bytes_per_pack"):
        raise ValueError("communication_options must be tf.distribute.experimental.CommunicationOptions. "
                         f"Received: {options!r}. Leave out devices and a cluster resolver: mpistrat run starts one "
                         "rank for each device.")
    options = options or CommunicationOptions()
    own = {"bytes_per_pack": options.bytes_per_pack, "timeout_seconds": options.timeout_seconds,
           "implementation": options.implementation.value}
    everybody = array_ops.allgather_object(own, names.eager("strategy/options"))
    if any(other != everybody[0] for other in everybody):
        raise InvalidRequestError("communication_options differ among the ranks: "
                                  + "; ".join(f"{other} on rank {rank}" for rank, other in enumerate(everybody)))
    nccl = tf.distribute.experimental.CommunicationImplementation.NCCL
    if options.implementation == nccl and not common.nccl_built() and common.rank() == 0:
        logger.warning("CommunicationOptions ask for NCCL, which is not available. MPI reduces the tensors.")
    apply_timeout(options)
    return options


def _require_equal(arguments: dict[str, object]) -> None:
    """Raise MismatchError on every rank unless all ranks have the same constructor arguments. Collective."""
    of_ranks = array_ops.allgather_object(arguments, names.eager("strategy/arguments"))
    for name in arguments:
        values = [other[name] for other in of_ranks]
        if len(set(values)) > 1:
            raise MismatchError(f"the ranks disagree on MPIStrategy({name}=): {describe_by_rank(values)}.")


def _default_device() -> str:
    """Return the name of the GPU that pin_gpu() assigns to this rank, or of the CPU if there is no GPU."""
    try:
        pin_by_default()
    except InvalidRequestError as error:
        logger.warning("rank %d: each rank may take memory on all GPUs of this host: %s", common.rank(), error)
    gpus = tf.config.list_logical_devices("GPU")
    return gpus[common.local_rank() % len(gpus)].name if gpus else "/device:CPU:0"


# -- what replaces each of TensorFlow's strategies under mpirun, by name -----------------------------------------------


def strategy(name: str, **options: Any) -> tf.distribute.Strategy:
    """Return the strategy that replaces TensorFlow's strategy `name` under mpirun. Collective.

        strategy = mpistrat.tensorflow.strategy("mirrored")

    Args:
        name: One of
            "mirrored": MPIStrategy. One rank for each device: `mpistrat run -np <devices>`.
            "multi_worker_mirrored": MPIStrategy.
            "central_storage": MPIStrategy(variables="central").
            "parameter_server": tf.distribute.ParameterServerStrategy over an MPIClusterResolver. Rank 0 is the
                coordinator, the last rank is the parameter server, and all other ranks are workers. On all ranks but 0
                the call runs TensorFlow's server until the coordinator has ended, and then ends the script like
                sys.exit(). So only rank 0 runs the code after the call.
            "one_device", "default": MPIStrategy on one rank, started with plain `python`.
        **options: The arguments of MPIStrategy, with these additions and exceptions:
            "mirrored": `cross_device_ops` of tf.distribute.MirroredStrategy is accepted too. It has no effect, because
                MPISTRAT_CPU_OPERATIONS chooses the algorithm. If the argument asks for another algorithm, rank 0 warns.
            "parameter_server": The only options are `jobs` and `variable_partitioner`. `jobs` is as for
                MPIClusterResolver, without evaluators; by default all ranks between the first and the last are workers.
                `variable_partitioner` is as for ParameterServerStrategy.

    Raises:
        InvalidRequestError: `name` is unknown or "tpu"; "one_device" or "default" has more than one rank; or
            "parameter_server" has an evaluator in `jobs`, or has no `jobs` and fewer than three ranks.
        ClusterError: On every rank, if the ranks cannot form a cluster; see MPIClusterResolver.
    """
    if name not in _FACTORIES:
        raise InvalidRequestError(f"strategy() takes one of the names {', '.join(_FACTORIES)}. Received: {name!r}")
    return _FACTORIES[name](**options)


def _mirrored(cross_device_ops: tf.distribute.CrossDeviceOps | None = None, **options: Any) -> MPIStrategy:
    runtime.init()
    if cross_device_ops is not None and common.rank() == 0:
        name, in_use = type(cross_device_ops).__name__, runtime.current().data_name
        if isinstance(cross_device_ops, tf.distribute.HierarchicalCopyAllReduce):
            if runtime.current().settings.cpu_operations == "mpi":
                logger.warning("%s has no effect. To use it, unset MPISTRAT_CPU_OPERATIONS, which is now mpi.", name)
        elif isinstance(cross_device_ops, tf.distribute.NcclAllReduce):
            if not common.nccl_built():
                logger.warning("%s: NCCL is not available. %s reduces the tensors.", name, in_use)
        else:
            logger.warning("%s has no effect under MPI. %s reduces the tensors, with the same results.", name, in_use)
    return MPIStrategy(**options)


def _alone(**options: Any) -> MPIStrategy:
    runtime.init()
    if common.size() > 1:
        raise InvalidRequestError('the strategies "one_device" and "default" are for one rank. Start the script '
                                  f'without mpirun, or write strategy("mirrored"). Received: {common.size()} ranks')
    return MPIStrategy(**options)


@checked
def _parameter_server(jobs: Mapping[str, int] | None = None,
                      variable_partitioner: Callable | None = None) -> tf.distribute.ParameterServerStrategy:
    runtime.init()
    if jobs is not None and jobs.get("evaluator"):
        raise InvalidRequestError("strategy() does not start evaluators, which run another program. Use "
                                  f"MPIClusterResolver, which gives each rank its role. Received: jobs={dict(jobs)}")
    if jobs is None:
        if common.size() < 3:
            raise InvalidRequestError('strategy("parameter_server") needs a coordinator, a worker and a parameter '
                                      f"server. Start 3 or more ranks (mpirun -np 3). Received: {common.size()} ranks")
        jobs = {"chief": 1, "worker": common.size() - 2, "ps": 1}
    resolver = MPIClusterResolver(jobs)
    if resolver.task_type != "chief":
        resolver.serve()
        sys.exit()
    return tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=variable_partitioner)


def _tpu(**options: Any) -> None:
    raise InvalidRequestError('there are no TPUs under MPI. On TPUs, use tf.distribute.TPUStrategy. On CPUs and GPUs '
                              'the same program runs with strategy("multi_worker_mirrored").')


_FACTORIES: dict[str, Callable[..., Any]] = {
    "mirrored": _mirrored, "multi_worker_mirrored": MPIStrategy,
    "central_storage": functools.partial(MPIStrategy, variables="central"), "parameter_server": _parameter_server,
    "one_device": _alone, "default": _alone, "tpu": _tpu}
