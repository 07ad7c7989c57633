"""MPIClusterResolver: describes the ranks as a cluster to TensorFlow's own strategies, without TF_CONFIG.

For users. The constructor is collective, the methods are local.
"""

import os
from collections.abc import Mapping

import tensorflow as tf

from ..core.errors import InvalidRequestError
from ..core.roles import Role
from ..process.cores import own_cpus
from .cluster import form

# Environment variables that TensorFlow reads when it starts its first server.
_SHARE_RESERVED_PORTS = {"TF_GRPC_REUSE_PORT": "1"}  # Without it gRPC's servers cannot bind a reserved port.
_FAIL_FAST = {"GRPC_FAIL_FAST": "use_caller"}  # Calls to a worker that has died fail instead of waiting for it.


class MPIClusterResolver(tf.distribute.cluster_resolver.ClusterResolver):
    """Takes roles from the ranks, gathers addresses over MPI, and reserves ports until TensorFlow's servers bind them.

        hvd.init()
        resolver = MPIClusterResolver({"chief": 1, "worker": 2, "ps": 1})
        if resolver.task_type in ("worker", "ps"):
            resolver.serve()          # returns when the chief has ended
        else:
            strategy = tf.distribute.ParameterServerStrategy(resolver)

    The constructor is collective. The methods are not, so any rank may call them at any time. The work of the other
    ranks ends when the chief calls `close`, or at the end of the chief's script.

    The address of each rank is `localhost` if all ranks share a host, and otherwise the address from which its host has
    connected to the chief's host. A TF_CONFIG of the platform is ignored: the tasks are the ranks of mpirun.

    Args:
        jobs: The number of ranks for each role. Ranks get their roles in the order of the dict, and the chief is
            first. Default: rank 0 is the chief, all other ranks are workers.
        num_accelerators: The number of devices of each kind in each task, for example `{"GPU": 1}`. Default: the GPUs
            that this process sees.
        rpc_layer: The protocol of the servers.

    Raises:
        NotInitializedError: Before init().
        ClusterError: On every rank, if the roles do not fit the ranks, there is no free port, or a rank cannot reach
            the chief.
    """

    def __init__(self, jobs: Mapping[str, int] | None = None, num_accelerators: Mapping[str, int] | None = None,
                 rpc_layer: str = "grpc"):
        """Form the cluster. Collective. The docstring of the class has the arguments and errors."""
        self._cluster = form(jobs)
        self._task_type, self._task_id = self._cluster.role.value, self._cluster.index
        self._num_accelerators = None if num_accelerators is None else dict(num_accelerators)
        self.rpc_layer = rpc_layer
        self._server: tf.distribute.Server | None = None
        os.environ.update(_SHARE_RESERVED_PORTS)
        if Role.PS.value in self._cluster.spec:
            os.environ.update(_FAIL_FAST)

    @property
    def task_type(self) -> str:
        """This rank's role: "chief", "worker", "ps" or "evaluator"."""
        return self._task_type

    @property
    def task_id(self) -> int:
        """This rank's index among the tasks of its role, from 0."""
        return self._task_id

    def cluster_spec(self) -> tf.train.ClusterSpec:
        """Return the addresses of all tasks. Evaluators are left out, as TensorFlow requires."""
        return tf.train.ClusterSpec(self._cluster.spec)

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the URL of a task's server, by default of this rank's; "" for an evaluator, which has no server."""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type not in self._cluster.spec:
            return ""
        layer = rpc_layer or self.rpc_layer
        address = self.cluster_spec().task_address(task_type, task_id)
        return f"{layer}://{address}" if layer else str(address)

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None,
                         config_proto: tf.compat.v1.ConfigProto | None = None) -> dict[str, int]:
        """Return the number of devices of each kind in a task. All tasks are assumed to have the same devices."""
        if self._num_accelerators is not None:
            return dict(self._num_accelerators)
        return {"GPU": len(tf.config.get_visible_devices("GPU"))}

    def serve(self) -> None:
        """Run this rank's tf.distribute.Server until the chief has ended. For workers and ps. Sleeps.

        Raises:
            RankDiedError: The chief has died.
            InvalidRequestError: This rank is neither a worker nor a ps.
        """
        if self._cluster.role not in (Role.WORKER, Role.PS):
            raise InvalidRequestError(f"a {self.task_type} has no server to run; serve() is for workers and ps.")
        # TensorFlow's default is a thread for each core. With one core, a function that waits for values of another
        # task takes the thread that would receive the values, and waits for ever. TensorFlow's tutorial also sets it:
        # https://www.tensorflow.org/tutorials/distribute/parameter_server_training#in-process_cluster
        threads = max(len(own_cpus()), sum(map(len, self._cluster.spec.values())) + 1)
        self._server = tf.distribute.Server(self.cluster_spec(), job_name=self.task_type, task_index=self.task_id,
                                            protocol=self.rpc_layer,
                                            config=tf.compat.v1.ConfigProto(inter_op_parallelism_threads=threads))
        self._cluster.wait_for_chief()

    def wait_for_chief(self, timeout_s: float | None = None) -> bool:
        """Wait until the chief has ended or called close(). Returns False if `timeout_s` has passed before. Sleeps.

        Raises:
            RankDiedError: The chief has died.
            InvalidRequestError: This rank is the chief.
        """
        return self._cluster.wait_for_chief(timeout_s)

    def close(self) -> None:
        """On the chief: end the work, so that all other ranks can end. On other ranks: leave the cluster early.

        Python calls close() at the end of the script. A second call does nothing.
        """
        self._cluster.close()
