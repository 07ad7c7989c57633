"""The arguments of a call of Keras. Arguments of Keras 2, in old scripts, raise an error that says what to write."""

import inspect

from .patches import Function

_DATASET = "Leave it out. A keras.utils.PyDataset passes it to super().__init__()."
_KERAS_2 = {
    "experimental_run_tf_function": "Leave it out: Keras 3 always calls the distributed optimizer.",
    "sample_weight_mode": "Leave it out, and give fit a sample_weight with a weight for each step in time.",
    "target_tensors": "Leave it out, and give the targets to fit.",
    "workers": _DATASET, "use_multiprocessing": _DATASET, "max_queue_size": _DATASET,
    "nb_epoch": "Write epochs.", "samples_per_epoch": "Write steps_per_epoch, in batches."}


def bound(original: Function, *args: object, **kwargs: object) -> inspect.BoundArguments:
    """Return the arguments of a call of `original`, bound to their names. Local.

    Raises:
        TypeError: The arguments do not match the signature, as for the call itself.
    """
    try:
        return inspect.signature(original).bind(*args, **kwargs)
    except TypeError as error:
        advice = [f" {name} is an argument of Keras 2. {_KERAS_2[name]}" for name in kwargs if name in _KERAS_2]
        raise TypeError(f"{original.__qualname__}() {error}.{''.join(advice)}") from None
