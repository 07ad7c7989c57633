"""Comparison of values that must be equal on all ranks: rates of optimizers, and what layers have learned by adapt().

Rates are settings such as the learning rate. All functions are local: those that compare get the values of all ranks.
"""

import functools
import hashlib
import inspect
import math
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf
from keras.optimizers import Optimizer

from ...core.errors import MismatchError
from ...core.topology import describe_by_rank
from ...tensorflow.kerases import IdentitySet, is_of_keras, learning_rate_of
from .private_names import all_layers, passes_on

# -- the rates of optimizers: learning rate, weight decay, loss scale, momentum ----------------------------------------

# A schedule is computed on each rank, and processors may round differently.
_RELATIVE = 1e-5


def number(value: object) -> float:
    """Return a number, or the value of a variable, as a float. float() itself fails for a variable of Keras 3.0."""
    return float(keras.ops.convert_to_numpy(value))


def rates_of(optimizers: Iterable[Optimizer]) -> tuple[tuple[str, float], ...]:
    """Return (label, rate) pairs. Rates that are user-defined functions are left out: calls may have side effects."""
    rates: list[tuple[str, float]] = []
    for optimizer in optimizers:
        hyper = vars(optimizer).get("_hyper", {})  # of a `legacy` optimizer of Keras 2
        found = {name: number(value) for name, value in hyper.items() if not callable(value)}
        rate = learning_rate_of(optimizer) if not passes_on(optimizer) else None
        if rate is not None:
            found["learning_rate"] = number(rate)
        arguments = {name for cls in type(optimizer).__mro__ if "__init__" in vars(cls)
                     for name in inspect.signature(vars(cls)["__init__"]).parameters}
        found |= {name: float(value) for name in sorted(arguments)
                  if isinstance(value := vars(optimizer).get(name), int | float)}
        if (scale := getattr(optimizer, "dynamic_scale", None)) is not None:
            found["dynamic_scale"] = number(scale)
        rates += [(f"{name} of {type(optimizer).__name__}", value) for name, value in found.items()]
    return tuple(rates)


def are_equal(a: float, b: float) -> bool:
    """Return whether two ranks' numbers are equal up to rounding. NaN equals NaN."""
    return math.isclose(a, b, rel_tol=_RELATIVE) or (math.isnan(a) and math.isnan(b))


def different_rate(of_ranks: Sequence[Sequence[tuple[str, float]]]) -> str:
    """Return a message on the first rate that differs between the ranks; "" if none differs."""
    for values in zip(*of_ranks, strict=False):
        label, numbers = values[0][0], [value for _, value in values]
        if not all(are_equal(value, numbers[0]) for value in numbers):
            found = describe_by_rank([f"{value:.6g}" for value in numbers])
            return f"the ranks have different values of the {label}: {found}. Their weights would drift apart."
    return ""


def require_equal_rates(of_ranks: Sequence[Sequence[tuple[str, float]]], place: str) -> None:
    """Raise MismatchError if the ranks' rates differ. The error begins with `place` ("fit: at the end of epoch 3")."""
    different = different_rate(of_ranks)
    if different:
        raise MismatchError(f"{place} {different} Set the same value on all ranks, and give all ranks the same "
                            "callbacks.")


# -- layers that learn from data by adapt(): vocabularies, boundaries, means and variances -----------------------------
#
# Ranks that adapt on their own rows have different vocabularies, so a word has a different number on each rank.

_LOOKUPS = ("StringLookup", "IntegerLookup")
# Classes of layers, and the attributes that they learn. The broadcast callback makes those in _VARIABLE equal.
_FIXED = ((("Discretization",), "bin_boundaries"), (_LOOKUPS, "idf_weights"))
_VARIABLE = ((("Normalization",), "mean"), (("Normalization",), "variance"))
_DEPTH = 4  # The depth of nested functions to search


@dataclass(frozen=True)
class Adapted:
    """What one layer has learned by adapt(), as digests and numbers that the ranks compare."""

    label: str  # The name of the layer for users
    table: bytes = b""  # A digest of the lookup tables; b"" if there are none
    fixed: tuple[float, ...] = ()  # Two numbers computed from all boundaries and word weights; () if there are none
    variable: tuple[float, ...] = ()  # Two numbers computed from all means and variances; () if there are none
    is_new: bool = False  # Whether the layer has learned nothing yet
    is_broadcast: bool = False  # Whether a BroadcastGlobalVariablesCallback makes means and variances equal

    def differs_from(self, other: "Adapted") -> str:
        """Return what differs from `other` by more than rounding, such as "vocabulary"; "" if nothing differs."""
        return "vocabulary" if self.table != other.table \
            else "boundaries or weights" if not _are_close(self.fixed, other.fixed) \
            else _STATISTICS if not _are_close(self.variable, other.variable) else ""


_STATISTICS = "mean and variance"
# The code that copies the learned state of a layer from rank 0.
_COPY = {
    "vocabulary": "layer.set_vocabulary(hvd.broadcast_object(layer.get_vocabulary(), 0))",
    "boundaries or weights": "layer.bin_boundaries = hvd.broadcast_object(layer.bin_boundaries, 0), or "
                             "layer.set_vocabulary with the vocabulary and the weights of rank 0",
    _STATISTICS: "hvd.broadcast_variables(layer.variables, 0); layer.finalize_state()",
}


def problem_of_adapted(of_ranks: Sequence[Sequence[Adapted]]) -> tuple[str, bool]:
    """Return a message on a layer whose learned state differs between ranks ("" if none), and whether fit may continue.

    If the ranks have different numbers of layers with a learned state, the states are not compared.
    """
    warning = ""
    if len(set(map(len, of_ranks))) > 1:
        return "", True
    for states in zip(*of_ranks, strict=True):
        kinds = [states[0].differs_from(state) for state in states]
        kind = next(filter(None, kinds), "")
        if not kind or (kind == _STATISTICS and states[0].is_broadcast and sum(not s.is_new for s in states) < 2):
            continue
        groups = list(dict.fromkeys((s.table, s.fixed, s.variable) for s in states))
        numbers = [f"{groups.index((s.table, s.fixed, s.variable)) + 1}" for s in states]
        text = (f"the ranks disagree on the {kind} of the layer {states[0].label}. Groups of ranks that agree: "
                f"{describe_by_rank(numbers, '{ranks}')}. Call layer.adapt with all rows, before hvd.shard. Or call it "
                f"on rank 0 only, and then run on all ranks: {_COPY[kind]}.")
        if kind != _STATISTICS or not states[0].is_broadcast:
            return text, False
        warning = warning or f"{text} Otherwise BroadcastGlobalVariablesCallback gives all ranks its root's {kind}."
    return warning, True


def adapted_in(layers: Iterable[keras.layers.Layer], is_broadcast: bool) -> tuple[Adapted, ...]:
    """Return what layers have learned by adapt(). `is_broadcast`: whether a callback broadcasts means and variances."""
    found: list[Adapted] = []
    inside: set[int] = set()
    for layer in layers:
        if hasattr(layer, "adapt") and id(layer) not in inside:
            parts = [part for each in (layer, *getattr(layer, "preprocessors", {}).values())  # of a FeatureSpace
                     for part in (each, *all_layers(each))]
            inside.update(map(id, parts))
            table = b"".join(_digest_of_table(part.lookup_table) for part in parts
                             if is_of_keras(part, *_LOOKUPS) and hasattr(part, "lookup_table"))
            fixed, variable = (_arrays(parts, attributes) for attributes in (_FIXED, _VARIABLE))
            is_new = not any(table) and all(not np.any(array - array.flat[0]) and array.flat[0] in (0.0, 1.0)
                                            for array in [*fixed, *variable])
            found.append(Adapted(f"{layer.name} ({type(layer).__name__})", table, _numbers(fixed), _numbers(variable),
                                 is_new, is_broadcast))
    return tuple(found)


def layers_of_inputs(inputs: object) -> list[keras.layers.Layer]:
    """Return the layers, also inner ones, that functions of tf.data pipelines in `inputs` (x and y of fit) use."""
    layers = (layer for value in tf.nest.flatten(inputs) for function in _functions_of(value)
              for layer in _layers_in(function, _DEPTH))
    return list(IdentitySet(each for layer in layers for each in (layer, *all_layers(layer))))


def _functions_of(dataset: object) -> Iterator[object]:
    if isinstance(dataset, tf.data.Dataset):
        for wrapper in dataset._functions():
            yield getattr(wrapper, "_func", None)
        for inside in dataset._inputs():
            yield from _functions_of(inside)


def _layers_in(value: object, depth: int) -> Iterator[keras.layers.Layer]:
    if is_of_keras(value, "Layer"):
        yield value
    elif depth:
        for each in _referenced(value):
            yield from _layers_in(each, depth - 1)


def _referenced(value: object) -> Iterable[object]:
    """Return the objects to which a function, a method or a container refers."""
    if isinstance(value, types.FunctionType):
        # A cell without a value equals a new one.
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        return [*cells, *(value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__)]
    if isinstance(value, types.MethodType):
        return [value.__func__, *vars(value.__self__).values()] if hasattr(value.__self__, "__dict__") else []
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def _arrays(parts: Iterable[keras.layers.Layer], attributes: Iterable[tuple[tuple[str, ...], str]]) -> list[np.ndarray]:
    values = [getattr(part, name, None) for part in parts for names, name in attributes if is_of_keras(part, *names)]
    return [array for array in (np.asarray(value, np.float64) for value in values if value is not None) if array.size]


def _numbers(arrays: list[np.ndarray]) -> tuple[float, ...]:
    """Return the projection of all values onto a fixed direction, and the norm of the values."""
    if not arrays:
        return ()
    values = np.concatenate([array.reshape(-1) for array in arrays])
    direction = np.random.default_rng(0).standard_normal(values.size)
    return float(direction @ values), float(np.linalg.norm(values))


def _are_close(numbers: tuple[float, ...], others: tuple[float, ...]) -> bool:
    """Return whether two results of _numbers are equal up to rounding errors that are relative to the norm."""
    return len(numbers) == len(others) and (not numbers or (
        are_equal(numbers[1], others[1]) and are_equal(numbers[0] + numbers[1], others[0] + numbers[1])))


def _digest_of_table(table: tf.lookup.StaticHashTable) -> bytes:
    """Return an 8-byte digest of the entries of a table, whatever their order; zeros for an empty table."""
    if not int(table.size()):
        return bytes(8)
    pair = [each if each.dtype == tf.string else tf.strings.as_string(each) for each in table.export()]
    hashes = tf.strings.to_hash_bucket_fast(tf.strings.join(pair, "\0"), 2**62)
    return hashlib.blake2b(tf.reduce_sum(hashes).numpy().tobytes(), digest_size=8).digest()
