"""What Horovod offers for graphs that a session of tf.compat.v1 runs: its optimizer, and its hook that broadcasts."""
