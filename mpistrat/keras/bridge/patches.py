"""The registry of the Keras functions that mpistrat replaces, with the reason for each replacement.

Modules register replacements with `replaces`, or with `replaces_for_strategy`. For models that mpistrat does not train,
a replacement does what the original does, except that model files are replaced atomically, and that optimizers add
tf.IndexedSlices in a fixed order. Replacements for strategies were tested with Keras 3.10 to 3.15.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

import keras

Function = Callable[..., Any]
F = TypeVar("F", bound=Function)


@dataclass(frozen=True)
class Patch:
    """A function of Keras, its replacement, and the reason: what would go wrong without the replacement."""

    owner: type | ModuleType  # Has the function
    name: str
    replacement: Function  # Called with the original, and then the arguments of the call
    reason: str  # What would happen without the replacement
    # A part of the function's source in the newest version of Keras that the reason is about, or a link. A test looks
    # for this text: if the text is missing, the replacement may be needless.
    upstream: str
    # True: applied when the first MPIStrategy is made. False: also with the first DistributedOptimizer, LocalSGD or
    # DiLoCo, and the first slices of a DistributedGradientTape. fit is replaced when mpistrat.keras is imported, since
    # Python looks up model.fit before it evaluates the arguments, which may make callbacks.
    is_for_strategy: bool


PATCHES: list[Patch] = []
# Each applied patch with the owner's own function of that name; None if the owner inherits the function.
_applied: list[tuple[Patch, Any]] = []


def replaces(owner: type | ModuleType, name: str, reason: str, upstream: str,
             is_for_strategy: bool = False) -> Callable[[F], F]:
    """Return a decorator that registers a function as replacement of `owner.name`. The arguments are those of Patch."""
    def register(replacement: F) -> F:
        PATCHES.append(Patch(owner, name, replacement, reason, upstream, is_for_strategy))
        return replacement
    return register


replaces_for_strategy = functools.partial(replaces, is_for_strategy=True)


def apply(for_strategy: bool = False, only: str = "") -> None:
    """Apply the registered replacements, or only those of functions named `only`. Those already applied are skipped.

    `for_strategy` includes the replacements for strategies. They are applied last, and so wrap the others.
    """
    applied = {id(patch) for patch, _ in _applied}
    for patch in sorted(PATCHES, key=lambda each: each.is_for_strategy):
        # Old versions of Keras, with which no strategy works, lack some functions.
        if id(patch) not in applied and patch.is_for_strategy <= for_strategy and only in ("", patch.name) \
                and hasattr(patch.owner, patch.name):
            own = vars(patch.owner).get(patch.name)
            _applied.append((patch, own))
            if isinstance(own, classmethod):
                setattr(patch.owner, patch.name, classmethod(_bound(patch.replacement, own.__func__)))
            else:
                setattr(patch.owner, patch.name, _bound(patch.replacement, getattr(patch.owner, patch.name)))


def _bound(replacement: Function, original: Function) -> Function:
    @functools.wraps(original)
    def replaced(*args: object, **kwargs: object) -> Any:
        return replacement(original, *args, **kwargs)
    return replaced


def undo() -> None:
    """Remove the replacements for strategies. Other replacements stay."""
    for patch, own in reversed(_applied):
        if patch.is_for_strategy and own is None:
            delattr(patch.owner, patch.name)
        elif patch.is_for_strategy:
            setattr(patch.owner, patch.name, own)
    _applied[:] = [each for each in _applied if not each[0].is_for_strategy]


# -- what Keras 2 accepts in old scripts, and Keras 3 does not ---------------------------------------------------------

_IGNORED = "experimental_run_tf_function"
_DATASET = "Leave it out, or give it to the constructor of your keras.utils.PyDataset."
_KERAS_2 = {
    _IGNORED: "Leave it out: Keras 3 always calls the distributed optimizer.",
    "sample_weight_mode": "Leave it out, and give fit a sample_weight with one weight for each time step.",
    "target_tensors": "Leave it out, and give the targets to fit.",
    "workers": _DATASET, "use_multiprocessing": _DATASET, "max_queue_size": _DATASET,
    "nb_epoch": "Write epochs= instead.", "samples_per_epoch": "Write steps_per_epoch=, a number of batches."}


def bound(original: Function, *args: object, **kwargs: object) -> inspect.BoundArguments:
    """Bind the arguments of a call to the parameters of `original`. Local. Raises TypeError if they do not fit."""
    try:
        return inspect.signature(original).bind(*args, **kwargs)
    except TypeError as error:
        advice = [f" {name} is an argument of Keras 2. {_KERAS_2[name]}" for name in kwargs if name in _KERAS_2]
        raise TypeError(f"{original.__qualname__}() {error}.{''.join(advice)}") from None


class _Variables(list):
    """The list of an optimizer's variables, made callable: Keras 2 has the method `optimizer.variables()`."""

    def __call__(self) -> "_Variables":
        return self


@functools.cache
def accept_words_of_keras2() -> None:
    """Make Keras 3 accept three forms of Keras 2 in Horovod scripts, for `mpistrat run --as-horovod=keras2` only.

    The argument `experimental_run_tf_function` of compile is ignored. `optimizer.variables()` returns the attribute
    `variables`. The argument `lr` of optimizers means `learning_rate`. The change is for the whole process. Local. A
    second call does nothing.
    """
    original = keras.Model.compile

    @functools.wraps(original)
    def compile_model(*args: object, **kwargs: object) -> Any:
        kwargs.pop(_IGNORED, None)
        return original(*args, **kwargs)

    known = inspect.signature(original)  # Code that binds arguments by the signature must find the word.
    word = inspect.Parameter(_IGNORED, inspect.Parameter.KEYWORD_ONLY, default=None)
    compile_model.__signature__ = known.replace(parameters=[*known.parameters.values(), word])  # type: ignore[attr-defined]
    keras.Model.compile = compile_model
    base = next(cls for cls in keras.optimizers.Optimizer.__mro__ if "variables" in vars(cls))
    variables: Function = vars(base)["variables"].fget
    base.variables = property(lambda self: _Variables(variables(self)))
    for cls in vars(keras.optimizers).values():
        if isinstance(cls, type) and issubclass(cls, keras.optimizers.Optimizer) and "__init__" in vars(cls):
            setattr(cls, "__init__", _with_lr(vars(cls)["__init__"]))  # noqa: B010 - mypy allows no assignment


def _with_lr(original: Function) -> Function:
    @functools.wraps(original)
    def initialise(self: keras.optimizers.Optimizer, *args: object, **kwargs: object) -> None:
        if "lr" in kwargs:
            kwargs["learning_rate"] = kwargs.pop("lr")
        original(self, *args, **kwargs)

    return initialise
