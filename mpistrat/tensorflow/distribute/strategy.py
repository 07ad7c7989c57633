"""MPIStrategy: tf.distribute's synchronous training with one replica per rank."""

import logging
from importlib import import_module
from typing import Any

import tensorflow as tf

from ...api import basics, runtime
from ...api import ops as array_ops
from ...core.errors import InvalidRequestError, MismatchError, MissingDependencyError
from ..pin_gpu import pin_gpu
from .options import agreed
from .threads import wire_name

logger = logging.getLogger(__name__)


class MPIStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """Trains one replica per rank: variables are equal on all ranks, gradients are averaged, input is shared out.

        strategy = mpistrat.tensorflow.MPIStrategy()
        with strategy.scope():
            model = build_and_compile_model()
        model.fit(dataset_of_global_batches, epochs=3)

    It takes no TF_CONFIG: the ranks are those of mpirun, and under plain `python` there is one. It is a
    MultiWorkerMirroredStrategy, since Keras asks for that class, but has nothing of it. Making one is collective, and
    calls mpistrat.init() if need be. It seeds TensorFlow alike on all ranks, so that all shuffle alike: with the seed
    that rank 0 has set, or a random one.

    Threads of one rank may use it at the same time, to read a metric for example, if the ranks can tell them apart: by
    the name that a thread was given, or else by the function that it runs. See threads.py.

    Args:
        communication_options: tf.distribute.experimental.CommunicationOptions, the same on all ranks; see options.py.
        device: Where variables and computation are, for example "GPU:0"; by default the GPU that pin_gpu(), which it
            calls, gives to this rank, or the CPU where there is none.
        random_per_rank: Whether Keras' layers (Dropout, augmentation) draw other numbers on each rank, as one process
            does for each row of the global batch.
        variables: "mirrored", or "central" to save memory. Then what Keras' optimizers remember of each variable, their
            slots (for Adam twice the size of the model), is on rank 0 only: there the sum of the gradients updates, and
            all get the new values in one exchange. The numbers are those of "mirrored". On the other ranks slots have
            no elements, and an optimizer that is saved there has none either. Every rank still has what it computes
            with: a working copy of the model's variables (BatchNormalization's statistics among them), and its own
            gradients, summed up over steps where an optimizer does so. The sum of the gradients comes from an
            all-reduce, so a step sends more than in "mirrored", and not less.

    Raises:
        InvalidRequestError: There is no such kind of variables; on this rank, before anything is sent.
        MissingDependencyError: The version of TensorFlow or Keras is one that it cannot work with; on this rank, before
            anything is sent.
        MismatchError: The ranks disagree on the kind of variables; on every rank.
    """

    def __init__(self, communication_options: Any = None, device: str | None = None, random_per_rank: bool = True,
                 variables: str = "mirrored"):
        if variables not in ("mirrored", "central"):
            raise InvalidRequestError(f'variables are "mirrored" or "central". Received: {variables!r}')
        # Not imported above, for they need names of TensorFlow and Keras that are not public, and may be missing.
        from .._private import resolve
        from . import checkpoints
        from .extended import RankExtended
        from .seeds import seed_alike
        checkpoints.check()
        patches = _patches_of_keras()
        runtime.init()
        options = agreed(communication_options)
        kinds = array_ops.allgather_object(variables, wire_name("variables"))
        if len(set(kinds)) > 1:
            raise MismatchError(f"the ranks disagree on the kind of variables; by rank: {', '.join(kinds)}.")
        extended = RankExtended(self, resolve(device or _default_device()), options, _resolver(), random_per_rank,
                                variables == "central")
        # Not the constructor of MultiWorkerMirroredStrategy, which would look for TF_CONFIG and start a server.
        tf.distribute.Strategy.__init__(self, extended)
        seed_alike()
        checkpoints.patch()
        if patches is not None:
            patches.apply()

    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        """Reduce over the replicas, and over `axis` of each value before. Collective.

        As tf.distribute.Strategy.reduce, with these differences: `value` may be nested, all of it is reduced in one
        go, and an axis is ignored for scalars, for Keras asks for the mean of its logs in that way.

        Args:
            reduce_op: SUM or MEAN; with an axis, MEAN is of all rows of all replicas.
            value: What `run` returned, on all ranks.
            axis: A number, a list of numbers, or None.
        """
        op = tf.distribute.ReduceOp(reduce_op.upper()) if isinstance(reduce_op, str) else reduce_op
        if axis is None:
            return super().reduce(op, value, None)
        flat = [self.extended.local(v) for v in tf.nest.flatten(value)]
        flat = [v if isinstance(v, float | int) else tf.convert_to_tensor(v) for v in flat]
        if op == tf.distribute.ReduceOp.SUM:
            summed = [tf.reduce_sum(v, axis) if _has_axes(v) else v for v in flat]
            return tf.nest.pack_sequence_as(value, tf.nest.flatten(super().reduce(op, summed, None)))
        return tf.nest.pack_sequence_as(value, self._means(flat, axis))

    def _means(self, values: list[Any], axis: Any) -> list[tf.Tensor]:
        counts = [tf.reduce_prod(tf.gather(tf.shape(v, tf.int64), axis)) if _has_axes(v) else tf.constant(1, tf.int64)
                  for v in values]
        sums = [tf.reduce_sum(v, axis) if _has_axes(v) else tf.convert_to_tensor(v) for v in values]
        total = super().reduce(tf.distribute.ReduceOp.SUM, [*sums, *counts], None)
        return [tf.math.truediv(numerator, tf.cast(denominator, numerator.dtype))
                for numerator, denominator in zip(total[:len(values)], total[len(values):], strict=True)]


def _has_axes(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and value.shape.rank != 0


def _default_device() -> str:
    """This rank's GPU, the only one that TensorFlow then sees, or the CPU where there is none."""
    try:
        pin_gpu()
    except InvalidRequestError as error:
        logger.warning("every rank of this host may take memory on all of its GPUs: %s", error)
    gpus = tf.config.list_logical_devices("GPU")
    return gpus[basics.local_rank() % len(gpus)].name if gpus else "/device:CPU:0"


def _resolver() -> tf.distribute.cluster_resolver.ClusterResolver:
    """What programs ask who is the chief: all ranks are workers, of which TensorFlow takes the first for the chief.

    That answer is right also for programs that know no task "chief", and what TensorFlow's own strategies say of a
    cluster without one. Nothing listens on the ports; a cluster of servers is what MPIClusterResolver forms.
    """
    topology = runtime.current().topology
    alone = len(topology.hosts) == 1
    workers = [f"{'localhost' if alone else host}:0" for host in topology.host_of]
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": workers}), task_type="worker", task_id=topology.rank,
        num_accelerators={"GPU": len(tf.config.list_logical_devices("GPU"))})


def _patches_of_keras() -> Any:
    """The module with what Keras is to do otherwise; None where there is no Keras 3."""
    try:
        import_module("mpistrat.keras")
    except MissingDependencyError as error:
        logger.info("MPIStrategy is for custom training loops here: %s", error)
        return None
    # An error if it cannot be done, since ranks would train models of their own without a word.
    patches = import_module("mpistrat.keras.distribute.patches")
    patches.check()
    return patches
