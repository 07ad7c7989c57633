"""Collectives as one asynchronous TensorFlow operation with a Python kernel: for GPU tensors, and in sessions.

call_site.py makes the nodes for GPU tensors, session_node.py the nodes in the graphs of tf.compat.v1 sessions.
"""
