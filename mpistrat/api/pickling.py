"""Pickle objects for other ranks, with cloudpickle where it is installed.

Called where objects and functions are sent to other ranks; local.
"""

import pickle


def dumps(obj: object) -> bytes:
    """Pickle an object. With cloudpickle, functions and classes that the script defines can be pickled too."""
    try:
        import cloudpickle
    except ImportError:
        return pickle.dumps(obj)
    return bytes(cloudpickle.dumps(obj))
