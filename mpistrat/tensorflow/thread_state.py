"""Python's state of TensorFlow's threads, kept from one callback to the next."""

import ctypes
import threading

_here = threading.local()


def keep_thread_state() -> None:
    """Let the thread that calls this callback keep what Python needs to run in it.

    TensorFlow's threads are unknown to Python. By default it makes a thread state, with a stack in fresh memory, when a
    callback begins, and frees it when it ends, which takes longer than most callbacks: about half of what a callback of
    a graph costs. One more PyGILState_Ensure than there are releases lets the state live as long as the thread.
    """
    if not hasattr(_here, "is_kept"):  # It is gone when the state is.
        ctypes.pythonapi.PyGILState_Ensure()
        _here.is_kept = True
