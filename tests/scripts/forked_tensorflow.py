"""Every rank forks; the child says what each collective on TensorFlow's tensors does, and the ranks then go on.

All tensors are made before the fork, because the child does not have TensorFlow's threads.
"""

import os
import sys

import tensorflow as tf
from children import exit_status
from reporting import attempt, say

import mpistrat.tensorflow as hvd

hvd.init()
tensor, rows = tf.ones([2, 3]), tf.ones([2 * hvd.size(), 3])
slices, variable = tf.IndexedSlices(tensor, tf.constant([0, 1]), tf.constant([4, 3])), tf.Variable(tensor)
splits = tf.fill([hvd.size()], 1)
calls = {
    "allreduce": lambda: hvd.allreduce(tensor, op=hvd.Sum), "of slices": lambda: hvd.allreduce(slices),
    "grouped_allreduce": lambda: hvd.grouped_allreduce([tensor, rows]), "allgather": lambda: hvd.allgather(tensor),
    "grouped_allgather": lambda: hvd.grouped_allgather([tensor, rows]),
    "broadcast": lambda: hvd.broadcast(tensor, 0), "broadcast_": lambda: hvd.broadcast_([variable], 0),
    "broadcast_variables": lambda: hvd.broadcast_variables([variable], 0),
    "reducescatter": lambda: hvd.reducescatter(rows),
    "grouped_reducescatter": lambda: hvd.grouped_reducescatter([rows]),
    "alltoall": lambda: hvd.alltoall(rows), "alltoall with splits": lambda: hvd.alltoall(rows, splits),
    "barrier": hvd.barrier, "join": hvd.join, "add_process_set": lambda: hvd.add_process_set([0])}
hvd.barrier()
child = os.fork()
if child == 0:
    for name, call in calls.items():
        say(name)
        attempt(call)
    sys.exit()
say(exit_status(child))
say(f"sum {float(hvd.allreduce(tensor, op=hvd.Sum)[0, 0])}")
