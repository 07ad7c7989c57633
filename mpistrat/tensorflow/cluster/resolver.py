"""MPIClusterResolver: tells TensorFlow's own strategies who is in the cluster, from the ranks, without TF_CONFIG."""

import os
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from ...core.errors import InvalidRequestError
from ...core.roles import Role
from .rendezvous import form

# TensorFlow reads these when it starts its first server.
_SHARE_HELD_PORTS = {"TF_GRPC_REUSE_PORT": "1"}  # without it gRPC's servers cannot take a reserved port
_FAIL_FAST = {"GRPC_FAIL_FAST": "use_caller"}  # calls to a worker that has died fail, and do not wait for it


class MPIClusterResolver(tf.distribute.cluster_resolver.ClusterResolver):
    """Roles from the ranks, addresses gathered over MPI, and ports that are held until TensorFlow's servers take them.

        hvd.init()
        resolver = MPIClusterResolver({"chief": 1, "worker": 2, "ps": 1})
        if resolver.task_type in ("worker", "ps"):
            resolver.serve()          # returns when the chief has ended
        else:
            strategy = tf.distribute.ParameterServerStrategy(resolver)

    Making one is collective. Afterwards it needs no communication among the ranks, so any of them may use it at any
    time. The others learn that the work is done when the chief calls `close`, or at the end of its script.

    All ranks are reached as `localhost` if they share a host, and otherwise by the addresses with which their hosts
    have connected to the chief's. Where a platform sets TF_CONFIG, its roles and addresses are taken, after a check
    that they fit the ranks.

    Args:
        jobs: How many ranks each role takes, in the order in which ranks are given out: chief, worker, ps, evaluator.
            The default is rank 0 as the chief and all others as workers, or what TF_CONFIG says.
        num_accelerators: Devices of each kind that each task has, for example `{"GPU": 1}`; the default is what this
            process sees.
        rpc_layer: The protocol of the servers.

    Raises:
        NotInitializedError: Before init().
        ClusterError: On every rank, if the roles do not fit the ranks, TF_CONFIG is wrong on some rank or does not fit,
            a port is taken, or ranks cannot reach the chief.
    """

    def __init__(self, jobs: Mapping[str, int] | None = None, num_accelerators: Mapping[str, int] | None = None,
                 rpc_layer: str = "grpc"):
        self._cluster = form(jobs)
        self._task_type, self._task_id = self._cluster.role.value, self._cluster.index
        self._num_accelerators = None if num_accelerators is None else dict(num_accelerators)
        self.rpc_layer = rpc_layer
        self._server: Any = None
        os.environ.update(_SHARE_HELD_PORTS)
        if Role.PS.value in self._cluster.spec:
            os.environ.update(_FAIL_FAST)

    def cluster_spec(self) -> tf.train.ClusterSpec:
        """The addresses of all tasks. An evaluator is not among them, as TensorFlow wants it."""
        return tf.train.ClusterSpec(self._cluster.spec)

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The URL of a task's server; of this rank's by default, or "" if it has none, as an evaluator."""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type not in self._cluster.spec:
            return ""
        layer = rpc_layer or self.rpc_layer
        address = self.cluster_spec().task_address(task_type, task_id)
        return f"{layer}://{address}" if layer else str(address)

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None,
                         config_proto: Any = None) -> dict[str, int]:
        """How many devices of each kind a task has; all tasks are taken to have as many as this one."""
        if self._num_accelerators is not None:
            return dict(self._num_accelerators)
        return {"GPU": len(tf.config.get_visible_devices("GPU"))}

    def serve(self) -> None:
        """Run this rank's tf.distribute.Server until the chief has ended. Sleeps meanwhile. For workers and ps.

        Raises:
            RankDiedError: The chief has died.
            InvalidRequestError: This rank is neither a worker nor a ps.
        """
        if self._cluster.role not in (Role.WORKER, Role.PS):
            raise InvalidRequestError(f"a {self.task_type} has no server to run; serve() is for workers and ps.")
        self._server = tf.distribute.Server(self.cluster_spec(), job_name=self.task_type, task_index=self.task_id,
                                            protocol=self.rpc_layer)
        self._cluster.wait_for_chief()

    def wait_for_chief(self, timeout_s: float | None = None) -> bool:
        """Wait until the chief has ended or called close(); whether it has when `timeout_s` has passed. Sleeps.

        Raises:
            RankDiedError: The chief has died.
            InvalidRequestError: This rank is the chief.
        """
        return self._cluster.wait_for_chief(timeout_s)

    def close(self) -> None:
        """On the chief: say that the work is done, which lets all others end. Elsewhere: leave the cluster early.

        At the end of the script it happens by itself. May be called twice.
        """
        self._cluster.close()
