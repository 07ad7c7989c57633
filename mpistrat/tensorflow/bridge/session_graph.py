"""Which graphs a session runs. Local."""

import weakref

import tensorflow as tf

_is_inside: "weakref.WeakKeyDictionary[tf.Graph, bool]" = weakref.WeakKeyDictionary()


def session_graph() -> tf.Graph | None:
    """Return the session's graph that is being traced, also inside of its branches, loops and functions.

    None: nothing is being traced, or a tf.function that Python calls is being traced.
    """
    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    is_inside = _is_inside.get(graph)
    if is_inside is None:
        with tf.init_scope():  # the context around all functions that are being traced
            is_inside = _is_inside[graph] = not tf.executing_eagerly()
    if not is_inside:
        return None
    while graph.building_function:
        graph = graph.outer_graph
    return graph
