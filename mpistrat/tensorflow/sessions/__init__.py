"""Graphs that a session of tf.compat.v1 runs: one asynchronous node for each collective, and Horovod's names for them.

`graph` says what is such a graph, `node` makes the nodes, and `runs` sees the calls of Session.run.
"""
