"""Collectives as one asynchronous operation of TensorFlow, whose kernel is Python: on GPUs, and in sessions.

call_site.py makes its nodes on GPUs, session_node.py in graphs that a session of tf.compat.v1 runs.
"""
