"""DistributedOptimizer and XLA, which cannot compile collectives: compile(jit_compile="auto") means False.

Model.compile is wrapped, since it is where Keras decides whether to use XLA. Called when a DistributedOptimizer is
created, and by load_model for a model that is compiled already.
"""

import contextlib
import functools
import inspect
import logging
from typing import Any

import keras

from ..api import runtime
from .optimizer_parts import distributed_in

logger = logging.getLogger(__name__)

_ARGUMENT = "jit_compile"


def without_auto() -> None:
    """Make Model.compile() take jit_compile="auto" as False for a distributed optimizer. A repeated call does nothing.

    By default Keras compiles the training step on a machine with a GPU. An explicit True is left as it is; then the
    collective raises an error that says what to write. So it does where compile() has no such argument.
    """
    # Keras compares the `compile` of a model's class with that of its own base class, so it is replaced there.
    owner = next(cls for cls in keras.Model.__mro__ if "compile" in vars(cls))
    original = owner.compile
    if getattr(original, "_mpistrat", False):
        return
    signature = inspect.signature(original)
    if _ARGUMENT not in signature.parameters:
        logger.warning("Keras %s has no argument %s of compile(): on a GPU, training with a DistributedOptimizer may "
                       "need another way to turn XLA off.", keras.__version__, _ARGUMENT)
        return

    @functools.wraps(original)
    def compile(self: keras.Model, *args: Any, **kwargs: Any) -> None:
        with contextlib.suppress(TypeError):  # Where the arguments do not fit, Keras raises its own error below.
            given = signature.bind(self, *args, **kwargs)
            given.apply_defaults()
            if given.arguments[_ARGUMENT] == "auto" and distributed_in(given.arguments.get("optimizer")):
                given.arguments[_ARGUMENT] = False
                args, kwargs = given.args[1:], given.kwargs
                _log_once()
        return original(self, *args, **kwargs)

    compile._mpistrat = True  # type: ignore[attr-defined]
    owner.compile = compile


def switch_off(model: keras.Model) -> None:
    """Turn XLA off for a compiled model whose optimizer has become a distributed one."""
    if model.jit_compile:
        _log_once()
        model.jit_compile = False


@functools.cache
def _log_once() -> None:
    rank = runtime.current().topology.rank if runtime.is_initialized() else 0
    logger.log(logging.DEBUG if rank else logging.INFO, "rank %d: models with a DistributedOptimizer are trained "
               "without XLA (jit_compile=False), which cannot compile collectives", rank)
