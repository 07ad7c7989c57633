"""Horovod's optimizer and its broadcast hook for graphs that a tf.compat.v1 session runs."""
