"""strategy(name): what replaces each of TensorFlow's strategies under mpirun, by name. For users."""

import functools
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from ..api import common, runtime
from ..cluster.resolver import MPIClusterResolver
from ..core.errors import InvalidRequestError
from .mpi_strategy import MPIStrategy

logger = logging.getLogger(__name__)


def strategy(name: str, **options: Any) -> tf.distribute.Strategy:
    """Return what replaces the strategy `name` of TensorFlow's guide under mpirun. Collective.

        strategy = mpistrat.tensorflow.strategy("mirrored")

    Args:
        name: One of
            "mirrored": MPIStrategy. One rank for each device: `mpistrat run -np <devices>`.
            "multi_worker_mirrored": MPIStrategy.
            "central_storage": MPIStrategy(variables="central").
            "parameter_server": tf.distribute.ParameterServerStrategy over an MPIClusterResolver. Rank 0 is the
                coordinator, the last rank is the parameter server, and all other ranks are workers. On the other ranks
                the call runs TensorFlow's server until the coordinator has ended, and then ends the script like
                sys.exit(). So only rank 0 runs the code after the call.
            "one_device", "default": MPIStrategy on one rank, started with plain `python`.
        **options: As for MPIStrategy, with these additions and exceptions:
            "mirrored": Also `cross_device_ops`, as for tf.distribute.MirroredStrategy. It has no effect, because
                MPISTRAT_CPU_OPERATIONS chooses the algorithm for the whole run; a warning says how they differ.
            "parameter_server": Only `jobs` and `variable_partitioner`. `jobs` is as for MPIClusterResolver, without
                evaluators; by default all ranks between the first and the last are workers. `variable_partitioner` is
                as for ParameterServerStrategy.

    Raises:
        InvalidRequestError: An unknown name; "tpu"; more than one rank for "one_device" or "default"; fewer than three
            ranks, or an evaluator among the jobs, for "parameter_server".
        ClusterError: The jobs do not fit the ranks, on every rank.
    """
    if name not in _FACTORIES:
        raise InvalidRequestError(f"strategy() takes one of the names {', '.join(_FACTORIES)}. Received: {name!r}")
    return _FACTORIES[name](**options)


def _mirrored(cross_device_ops: tf.distribute.CrossDeviceOps | None = None, **options: Any) -> MPIStrategy:
    runtime.init()
    if cross_device_ops is not None and common.rank() == 0:
        difference = _difference(cross_device_ops)
        if difference:
            logger.warning("%s", difference)
    return MPIStrategy(**options)


def _difference(cross_device_ops: tf.distribute.CrossDeviceOps) -> str:
    """Return a message on how the reduction differs from that of `cross_device_ops`; "" if they are the same."""
    name, in_use = type(cross_device_ops).__name__, runtime.current().data_name
    if isinstance(cross_device_ops, tf.distribute.HierarchicalCopyAllReduce):
        return "" if runtime.current().settings.cpu_operations != "mpi" else \
            f"{name}: MPISTRAT_CPU_OPERATIONS=mpi leaves out the stage within each host."
    if isinstance(cross_device_ops, tf.distribute.NcclAllReduce):
        return "" if common.nccl_built() else f"{name}: NCCL is not available. {in_use} reduces the tensors."
    return f"{name} has no effect under MPI. {in_use} reduces the tensors, with the same results."


def _alone(**options: Any) -> MPIStrategy:
    runtime.init()
    if common.size() > 1:
        raise InvalidRequestError('the strategies "one_device" and "default" are for one rank. Start the script '
                                  f'without mpirun, or write strategy("mirrored"). Received: {common.size()} ranks')
    return MPIStrategy(**options)


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
    "central_storage": functools.partial(MPIStrategy, variables="central"),
    "parameter_server": _parameter_server, "one_device": _alone, "default": _alone, "tpu": _tpu,
}
