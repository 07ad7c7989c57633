"""strategy(name): the counterpart under mpirun of each of TensorFlow's strategies, by name. For users."""

import functools
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from ..api import basics, runtime
from ..cluster.resolver import MPIClusterResolver
from ..core.errors import InvalidRequestError
from .mpi_strategy import MPIStrategy

logger = logging.getLogger(__name__)


def strategy(name: str, **options: Any) -> tf.distribute.Strategy:
    """Return the counterpart of the strategy of that name in TensorFlow's guide. Collective.

        strategy = mpistrat.tensorflow.strategy("mirrored")

    Args:
        name: One of
            "mirrored": MPIStrategy. One rank for each device: `mpistrat run -np <devices>`.
            "multi_worker_mirrored": MPIStrategy.
            "central_storage": MPIStrategy(variables="central").
            "parameter_server": tf.distribute.ParameterServerStrategy over an MPIClusterResolver, on rank 0, which is
                the coordinator. The last rank holds the variables, and the ranks between compute. On those ranks the
                call runs TensorFlow's server until the coordinator has ended, and then ends the script as sys.exit()
                does. So only rank 0 runs the code after the call.
            "one_device", "default": MPIStrategy on one rank, started with plain `python`.
        **options: As for MPIStrategy, with these additions and exceptions:
            "mirrored": `cross_device_ops`, as for tf.distribute.MirroredStrategy. It has no effect, because
                MPISTRAT_CPU_OPERATIONS chooses the algorithm for the whole run; a warning says where the two differ.
            "parameter_server": only `jobs` and `variable_partitioner`. `jobs` is as for MPIClusterResolver, without
                evaluators; by default all ranks between the first and the last are workers. `variable_partitioner` is
                as for ParameterServerStrategy.

    Raises:
        InvalidRequestError: An unknown name; "tpu"; more than one rank for "one_device" or "default"; fewer than three
            for "parameter_server", or an evaluator among its jobs.
        ClusterError: The jobs do not fit the ranks, on every rank.
    """
    if name not in _FACTORIES:
        raise InvalidRequestError(f"there is no strategy {name!r}; the names are {', '.join(_FACTORIES)}.")
    return _FACTORIES[name](**options)


def _mirrored(cross_device_ops: tf.distribute.CrossDeviceOps | None = None, **options: Any) -> MPIStrategy:
    runtime.init()
    if cross_device_ops is not None and basics.rank() == 0:
        difference = _difference(cross_device_ops)
        if difference:
            logger.warning("%s", difference)
    return MPIStrategy(**options)


def _difference(cross_device_ops: tf.distribute.CrossDeviceOps) -> str:
    """How the reduction differs from that of `cross_device_ops`; "" if it does not."""
    name, in_use = type(cross_device_ops).__name__, runtime.current().data_name
    if isinstance(cross_device_ops, tf.distribute.HierarchicalCopyAllReduce):
        return "" if runtime.current().settings.cpu_operations != "mpi" else \
            f"{name}: MPISTRAT_CPU_OPERATIONS=mpi leaves out the stage within each host."
    if isinstance(cross_device_ops, tf.distribute.NcclAllReduce):
        return "" if basics.nccl_built() else f"{name}: NCCL is not there; tensors go through {in_use}."
    return f"{name} has no counterpart here, and changes no results; tensors go through {in_use}."


def _alone(**options: Any) -> MPIStrategy:
    runtime.init()
    if basics.size() > 1:
        raise InvalidRequestError(f'the strategies "one_device" and "default" are for one rank; there are '
                                  f'{basics.size()}. Start the script without mpirun, or take "mirrored".')
    return MPIStrategy(**options)


def _parameter_server(jobs: Mapping[str, int] | None = None,
                      variable_partitioner: Callable | None = None) -> tf.distribute.ParameterServerStrategy:
    runtime.init()
    if jobs is not None and jobs.get("evaluator"):
        raise InvalidRequestError("an evaluator runs a program of its own, and has no strategy. Take "
                                  f"MPIClusterResolver, which gives each rank its role. Received: jobs={dict(jobs)}")
    if jobs is None:
        if basics.size() < 3:
            raise InvalidRequestError("a coordinator, a worker and a parameter server are 3 ranks; there are "
                                      f"{basics.size()} (mpirun -np 3).")
        jobs = {"chief": 1, "worker": basics.size() - 2, "ps": 1}
    resolver = MPIClusterResolver(jobs)
    if resolver.task_type != "chief":
        resolver.serve()
        sys.exit()
    return tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=variable_partitioner)


def _tpu(**options: Any) -> None:
    raise InvalidRequestError('there are no TPUs under MPI; on TPUs, take tf.distribute.TPUStrategy. On CPUs and GPUs '
                              'the same program runs with "multi_worker_mirrored".')


_FACTORIES: dict[str, Callable[..., Any]] = {
    "mirrored": _mirrored, "multi_worker_mirrored": MPIStrategy,
    "central_storage": functools.partial(MPIStrategy, variables="central"),
    "parameter_server": _parameter_server, "one_device": _alone, "default": _alone, "tpu": _tpu,
}
