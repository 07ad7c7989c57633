"""Horovod's names for the broadcast of variables in the graph of a tf.compat.v1 session. For users."""

import tensorflow as tf

from ...api.process_sets import ProcessSet, global_process_set
from ..bridge.program_order import session_graph
from ..ops import broadcast_variables

_TEXT = ("{name} works only in the graph of a tf.compat.v1 session, and no such graph is active. Call "
         "broadcast_variables(variables, root_rank) after the variables have been created, or pass callbacks."
         "BroadcastGlobalVariablesCallback(root_rank) of mpistrat.keras to fit().")


def broadcast_global_variables(root_rank: int) -> tf.Operation:
    """Return the operation that assigns root_rank's values to all global variables of the graph. Collective when run.

    Raises:
        RuntimeError: No graph of a session is active. Use broadcast_variables.
    """
    if session_graph() is None:
        raise RuntimeError(_TEXT.format(name="broadcast_global_variables()"))
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Broadcasts all global variables when a MonitoredSession has initialized or restored them. Collective.

    Args:
        root_rank: The rank whose values all ranks get.
        device: Accepted for compatibility with Horovod, ignored.
        process_set: The ranks that take part; `root_rank` is one of them.

    Raises:
        RuntimeError: When the hook begins, if no graph of a session is active.
    """

    def __init__(self, root_rank: int, device: str = "", process_set: ProcessSet = global_process_set):
        self._root_rank, self._process_set = root_rank, process_set
        self._broadcast: tf.Operation | None = None

    def begin(self) -> None:
        """Create the broadcast operation in the graph of the session."""
        if session_graph() is None:
            raise RuntimeError(_TEXT.format(name="BroadcastGlobalVariablesHook"))
        graph = tf.compat.v1.get_default_graph()
        if self._broadcast is None or self._broadcast.graph is not graph:
            self._broadcast = broadcast_variables(tf.compat.v1.global_variables(), self._root_rank, self._process_set)

    def after_create_session(self, session: tf.compat.v1.Session, coord: object) -> None:
        """Run the broadcast. Collective."""
        session.run(self._broadcast)
