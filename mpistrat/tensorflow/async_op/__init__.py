"""Collectives as one asynchronous operation of TensorFlow, whose kernel is Python: on GPUs, and in sessions.

See call_site.py. `session_node` makes the nodes of graphs that a session of tf.compat.v1 runs, `session_runs` sees the
calls of Session.run.
"""
