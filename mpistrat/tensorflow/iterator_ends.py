"""The end of tf.data iterators: a thread of its own destroys each of them while there are other ranks.

The destructor of an iterator waits for the thread that tunes its dataset. That thread may miss the request to end, and
then sleeps on: 10 ms at first, up to 60 s in an old iterator. Its loop is notified by a callback of StartCancel and
asks IsCancelled(), which StartCancel sets only after its callbacks:
https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/core/framework/model.cc#L2563
https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/core/framework/cancellation.cc#L84
With one core for each rank that is common. Without this module it would stop the thread that drops an iterator, be it
the main thread at the end of an epoch, or any thread in Python's garbage collector, and with it all ranks.
"""

import _thread  # threading.Thread takes locks, which the thread may hold that the garbage collector interrupts.

from tensorflow.python.data.ops.iterator_ops import OwnedIterator
from tensorflow.python.framework.ops import EagerTensor

from ..api import runtime


def _destroy_elsewhere(iterator: OwnedIterator) -> None:
    """Python calls it in any thread before it deletes an iterator. In a graph the resource is a symbolic tensor."""
    if not (runtime.is_initialized() and runtime.current().topology.size > 1):
        return
    # A list, so that the new thread has the last reference.
    resources = [vars(iterator).pop("_iterator_resource", None)]
    if isinstance(resources[0], EagerTensor):
        try:
            _thread.start_new_thread(resources.clear, ())
        except RuntimeError:
            pass  # Python ends, or the process may have no more threads. This thread destroys the iterator.


OwnedIterator.__del__ = _destroy_elsewhere
