"""Copies of distributed optimizers, and `compile` of models that have a distributed optimizer. Local.

`copy_of` makes a new optimizer with the same configuration and without state. A Keras configuration contains only plain
values, from which Keras makes objects if it knows their classes. So `copy_of` itself hands over learning rates that are
schedules or functions, and copies inner optimizers.

Keras itself copies by configurations and files. Both name the original class, so they load without mpistrat. But a copy
that Keras makes in this process must be distributed again. Therefore the name in a configuration carries a function
that distributes the optimizer made from the configuration (by `from_config`, `deserialize` or `compile_from_config`).
pickle and copy get a function that distributes the loaded optimizer, or the optimizer of the loaded model.
"""

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, SupportsIndex

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from ..api import runtime
from ..tensorflow.kerases import is_optimizer
from ..tensorflow.xla.context import why_not
from .bridge.patches import PATCHES, Function, bound, replaces
from .bridge.private_names import BaseTrainer, distributed_in, parts_of, passes_on
from .bridge.training import is_under_strategy

logger = logging.getLogger(__name__)

# The constructor's arguments that may be schedules, functions or optimizers, and the attributes with their values.
_OBJECTS = {"learning_rate": "_learning_rate", "inner_optimizer": "inner_optimizer", "optimizer_map": "_optimizer_map"}
# Arguments of a `legacy` optimizer of Keras 2 that its configuration does not contain.
_OWN = ("gradient_transformers", "gradient_aggregator")
# A function that distributes a copy of an optimizer like the original.
Again = Callable[[Optimizer], Optimizer]


def copy_of(optimizer: Optimizer, cls: type[Optimizer] | None = None, changes: Mapping[str, object] | None = None,
            copies: dict[int, Optimizer] | None = None) -> Any:
    """Return a new optimizer with the configuration of `optimizer`, which is not changed.

    `cls` is the class of the copy, a subclass of the original Keras class; None: that Keras class, not distributed.
    `changes` replace values of the configuration. `copies` has the copies made so far, by the id of the original. A
    MultiOptimizer that gets its optimizers from a function shares the function, and so the optimizers, with its copy.
    """
    original = original_class(type(optimizer))
    cls, copies = cls or original, {} if copies is None else copies
    if id(optimizer) in copies:
        return copies[id(optimizer)]
    hyper = vars(optimizer).get("_hyper", {})  # The numbers of a `legacy` optimizer of Keras 2
    values = {name: hyper[name] if name in hyper else getattr(optimizer, attribute, None)
              for name, attribute in _OBJECTS.items()}
    given = {name: value for name, value in values.items() if callable(value) or is_optimizer(value)}
    config = _config_without(optimizer, given) | {
        name: _copied(value, copies) for name, value in given.items()} | dict(changes or {})
    if again_of(config) is not None:
        config["name"] = str(config["name"])
    # Keras' own from_config reads optimizers from plain values only. A class of the user may have its own from_config.
    copied = cls(**config) if set(given) - {"learning_rate"} else original.from_config.__func__(cls, config)
    for name, value in vars(optimizer).items():
        # The configuration does not contain the settings of exclude_from_weight_decay.
        if name in _OWN or (name.startswith("_exclude_from_weight_decay") and not name.endswith("_cache")):
            setattr(copied, name, value)
    copies[id(optimizer)] = copied
    return copied


def sharing(optimizer: Optimizer, cls: type[Optimizer], changes: Mapping[str, object]) -> Any:
    """Return a Keras 2 optimizer of class `cls` with the variables of `optimizer`. `changes` may have a new name."""
    new = object.__new__(cls)
    vars(new).update(vars(optimizer))
    if "name" in changes:
        vars(new)["_name" if "_name" in vars(new) else "name"] = changes["name"]
    return new


def _config_without(optimizer: Optimizer, arguments: Iterable[str]) -> dict[str, Any]:
    """Return the configuration without some constructor arguments, whose values Keras may not be able to save."""
    stand_in = object.__new__(type(optimizer))
    vars(stand_in).update(vars(optimizer))
    if "_hyper" in vars(optimizer):
        vars(stand_in)["_hyper"] = vars(optimizer)["_hyper"] | {name: tf.constant(0.0) for name in arguments}
    # get_config of an older Keras fails without a learning rate.
    vars(stand_in).update({_OBJECTS[name]: tf.constant(0.0) if name == "learning_rate" else None for name in arguments})
    config: dict[str, Any] = stand_in.get_config()
    return {name: value for name, value in config.items() if name not in arguments}


def original_class(cls: type[Optimizer]) -> type[Optimizer]:
    """Return the Keras class to which mpistrat has added mix-ins. Return a class without such mix-ins unchanged."""
    return cls.__bases__[-1] if hasattr(cls, "is_distributed") else cls


def _copied(value: object, copies: dict[int, Optimizer]) -> object:
    """Copy an optimizer, or an OptimizerMap with its optimizers. Return anything else unchanged."""
    if is_optimizer(value):
        return copy_of(value, copies=copies)
    if isinstance(value, Mapping) and hasattr(value, "default_optimizer"):
        cls: Any = type(value)
        return cls(copy_of(value.default_optimizer, copies=copies),
                   {name: copy_of(each, copies=copies) for name, each in value.items()})
    return value


# -- copies that Keras makes ------------------------------------------------------------------------------------------


class _MarkedName(str):
    """A name in a configuration, with a function that distributes copies. Files and pickles get a plain string."""

    def __new__(cls, name: str, again: Again) -> "_MarkedName":
        marked = super().__new__(cls, name)
        marked.again = again
        return marked

    again: Again

    def __deepcopy__(self, memo: object) -> "_MarkedName":
        return self

    def __reduce_ex__(self, protocol: object) -> Any:
        return str, (str(self),)


def marked(config: dict[str, Any], again: Again) -> dict[str, Any]:
    """Return `config` with the function `again` attached to the name. Without a name, return it unchanged."""
    return config | {"name": _MarkedName(config["name"], again)} if "name" in config else config


def again_of(config: Mapping[str, Any]) -> Again | None:
    name = config.get("name")
    return name.again if isinstance(name, _MarkedName) else None


def keep_marks(cls: type[Optimizer]) -> None:
    """Make `cls.from_config` distribute optimizers from configurations with a marked name. Further calls do nothing."""
    owner = next(base for base in cls.__mro__ if "from_config" in vars(base))
    if not any(patch.owner is owner and patch.name == "from_config" for patch in PATCHES):
        replaces(owner, "from_config", "a copy would train alone",
                 "https://github.com/keras-team/keras/blob/v3.10.0/keras/src/optimizers/base_optimizer.py")(from_config)


def from_config(original: Function, cls: type[Optimizer], config: dict[str, Any], *args: object,
                **kwargs: object) -> Optimizer:
    again = again_of(config)
    if again is None:
        return original(cls, config, *args, **kwargs)
    return again(original(cls, config | {"name": str(config["name"])}, *args, **kwargs))


@replaces(keras.Model, "__reduce_ex__", "pickle and copy would make a model that trains alone",
          "https://github.com/keras-team/keras/blob/v3.10.0/keras/src/saving/keras_saveable.py")
def reduce_ex(original: Function, self: keras.Model, protocol: SupportsIndex) -> Any:
    how = original(self, protocol)
    optimizer = getattr(self, "optimizer", None)
    return distributed_when_loaded(optimizer, how) if distributed_in(optimizer) else how


def distributed_when_loaded(optimizer: Optimizer, how: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return `how`, a result of __reduce_ex__, changed so that pickle and copy load a distributed optimizer.

    `optimizer` is the copied optimizer, or that of the copied model. It, or an inner optimizer, is distributed.
    """
    load, arguments = how[:2]
    owner = getattr(load, "__self__", None)
    if not isinstance(owner, type):
        return how  # The first versions of Keras 3 do not copy by files, and cannot copy a distributed optimizer.
    load = getattr(original_class(owner), load.__name__)  # pickle finds the original class by its name.
    inside = distributed_in(optimizer)
    is_whole = inside == [optimizer] or inside == [part for part in parts_of(optimizer) if not passes_on(part)]
    return _load, (inside[0]._mpistrat_again(is_in_process=False, is_whole=is_whole), load, *arguments), *how[2:]


def _load(again: Again, load: Callable[..., Any], *arguments: object) -> Any:
    """Load an optimizer or a model, and distribute the optimizer if mpistrat is initialised in this process."""
    loaded = load(*arguments)
    if not runtime.is_initialized():
        return loaded
    if is_optimizer(loaded):
        return again(loaded)
    if getattr(loaded, "optimizer", None) is not None and not distributed_in(loaded.optimizer):
        replace_optimizer(loaded, again(loaded.optimizer))
    return loaded


def replace_optimizer(model: keras.Model, optimizer: Optimizer) -> None:
    """Give a compiled model the distributed `optimizer`. Turn XLA off if XLA cannot compile collectives."""
    model.optimizer = optimizer
    compiled = getattr(model, "_compile_config", None)
    if compiled is not None:  # compile_from_config makes the optimizer of a copy from it.
        compiled.config["optimizer"] = optimizer
    if model.jit_compile and (reason := why_not()):
        _log_once(reason)
        model.jit_compile = False


# -- XLA: if XLA cannot compile collectives here, compile(jit_compile="auto") means False ------------------------------


# Keras compares the `compile` of a model's class with that of Keras' base class, so the base class' is replaced.
@replaces(BaseTrainer, "compile", "XLA cannot compile collectives, and under a strategy optimizer and "
          "metrics would not be those of its scope", "self._resolve_auto_jit_compile()")
def compile(original: Function, self: keras.Model, *args: object, **kwargs: object) -> None:
    """Replace Model.compile. A distributed optimizer turns jit_compile="auto" off if XLA cannot compile collectives.

    With "auto", the default, Keras compiles the train step on a machine with a GPU. True stays True; then collectives
    raise an error that says what to write. For a model of a strategy, compile runs in the strategy's scope.
    """
    if is_under_strategy(self):
        with self.distribute_strategy.scope():
            return original(self, *args, **kwargs)
    given = bound(original, self, *args, **kwargs)
    given.apply_defaults()
    if given.arguments["jit_compile"] == "auto" and distributed_in(given.arguments["optimizer"]) and why_not():
        given.arguments["jit_compile"] = False
        _log_once(why_not())
    return original(*given.args, **given.kwargs)


def follow_ranks(model: keras.Model) -> None:
    """If the number of ranks has changed since the last fit, make Keras trace the model's train step again for XLA.

    Sparse gradients are gathered, and the shape of a gather's result depends on the number of ranks.
    """
    if not model.jit_compile or not runtime.is_initialized():
        return
    ranks = runtime.current().topology.size
    if getattr(model, "_mpistrat_ranks", ranks) != ranks:
        model.train_function = None
    model._mpistrat_ranks = ranks


@functools.cache
def _log_once(reason: str) -> None:
    rank = runtime.current().topology.rank if runtime.is_initialized() else 0
    logger.log(logging.DEBUG if rank else logging.INFO, "rank %d: models with a DistributedOptimizer are trained "
               "without XLA (jit_compile=False), because XLA cannot compile collectives: %s", rank, reason)
