"""What layers have learned by adapt(): which differences between ranks are found, and which layers a pipeline calls."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")
pytest.importorskip("mpistrat.keras")

from mpistrat.keras.bridge.compared import Adapted, adapted_in, layers_of_inputs, problem_of_adapted  # noqa: E402

WORDS, OTHERS = np.array(["a", "b", "b", "c"]), np.array(["a", "a", "b", "c"])
NUMBERS = np.array([[1.0], [2.0], [5.0], [9.0]], np.float32)


def feature_space() -> Any:
    return keras.utils.FeatureSpace({"word": keras.utils.FeatureSpace.string_categorical()}, output_mode="dict")


def of_words(words: np.ndarray) -> Any:
    return tf.data.Dataset.from_tensor_slices({"word": words})


# A layer, what it learns, what another rank learns, and what differs then.
LAYERS: dict[str, tuple[Callable[[], Any], Any, Any, str]] = {
    "StringLookup": (lambda: keras.layers.StringLookup(), WORDS, OTHERS, "vocabulary"),
    "inverted": (lambda: keras.layers.StringLookup(invert=True), WORDS, OTHERS, "vocabulary"),
    "tf_idf": (lambda: keras.layers.StringLookup(output_mode="tf_idf"), WORDS[:, None],
               np.array([["a"], ["b"], ["b"], ["b"], ["c"]]), "boundaries or weights"),
    "IntegerLookup": (lambda: keras.layers.IntegerLookup(), np.array([1, 2, 2]), np.array([1, 1, 2]), "vocabulary"),
    "TextVectorization": (lambda: keras.layers.TextVectorization(), WORDS, OTHERS, "vocabulary"),
    "Discretization": (lambda: keras.layers.Discretization(num_bins=2), NUMBERS, NUMBERS + 1, "boundaries or weights"),
    "Normalization": (lambda: keras.layers.Normalization(), NUMBERS, NUMBERS * 1.001, "mean and variance"),
    "FeatureSpace": (feature_space, of_words(WORDS), of_words(OTHERS), "vocabulary"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_have_learned_other_things_are_told_apart(name: str) -> None:
    make, data, others, kind = LAYERS[name]
    layers = [make() for _ in range(4)]
    for layer, learned in zip(layers, (data, data, others)):
        layer.adapt(learned)
    first, same, other, new = (adapted_in([layer], False) for layer in layers)
    assert [len(each) for each in (first, same, other, new)] == [1] * 4
    assert first[0].differs_from(same[0]) == ""
    assert first[0].differs_from(other[0]) == kind
    assert first[0].differs_from(new[0]) != ""
    assert [each.is_new for (each,) in (first, other, new)] == [False, False, True]


def test_means_may_be_rounded_differently() -> None:
    one, other = (Adapted("n", variable=(0.001 * scale, 5.0)) for scale in (1.0, 1.001))
    assert one.differs_from(other) == ""
    assert one.differs_from(Adapted("n", variable=(0.002, 5.0))) == "mean and variance"


A, B, NEW = (Adapted("words (StringLookup)", table) for table in (b"a", b"b", b"\0"))
N, M = (Adapted("n (Normalization)", variable=(value, 1.0), is_broadcast=True) for value in (0.5, 0.6))
NEW_N = Adapted("n (Normalization)", variable=(0.0, 1.0), is_new=True, is_broadcast=True)


def test_a_difference_names_layer_and_ranks_and_what_to_write() -> None:
    text, may_go_on = problem_of_adapted([[N, A], [N, B], [N, A], [N, NEW]])
    assert not may_go_on
    assert text == ("the ranks disagree on the vocabulary of the layer words (StringLookup). Groups of ranks that "
                    "agree: [0, 2]; [1]; [3]. Call layer.adapt with all rows, before hvd.shard. Or call it on rank 0 "
                    "only, and then run on all ranks: "
                    "layer.set_vocabulary(hvd.broadcast_object(layer.get_vocabulary(), 0)).")


@pytest.mark.parametrize(("states", "is_said", "may_go_on"), [
    ([[A, N], [A, N]], False, True), ([[A], [A, N]], False, True), ([[], []], False, True),
    ([[N], [NEW_N], [NEW_N]], False, True), ([[N], [M], [NEW_N]], True, True),
    ([[Adapted("n", variable=(v, 1.0), is_new=v == 0)] for v in (0.5, 0.0)], True, False)],
    ids=["equal", "not comparable", "none", "broadcast from one rank", "broadcast of one of several", "no broadcast"])
def test_what_the_broadcast_callback_makes_equal_is_no_error(states: list, is_said: bool, may_go_on: bool) -> None:
    text, goes_on = problem_of_adapted(states)
    assert (bool(text), goes_on) == (is_said, may_go_on)
    assert ("BroadcastGlobalVariablesCallback gives all ranks its root's" in text) == (is_said and may_go_on)


LOOKUP = keras.layers.StringLookup(vocabulary=["a"])


def encode(word: Any) -> Any:
    return LOOKUP(word)


class Encoder:
    def __init__(self) -> None:
        self.layers = {"words": LOOKUP}

    def encode(self, word: Any) -> Any:
        return self.layers["words"](word)


def of_closure() -> Callable:
    layer = LOOKUP
    return lambda word: (layer(word), 1)


# A function of a pipeline that calls LOOKUP.
FUNCTIONS: dict[str, Callable[[], Any]] = {
    "the layer": lambda: LOOKUP, "a closure": of_closure, "a global": lambda: encode,
    "a function of a function": lambda: lambda word: encode(word), "a method": lambda: Encoder().encode,
    "a partial": lambda: functools.partial(lambda layer, word: layer(word), LOOKUP),
    "in a model": lambda: keras.Sequential([keras.Input((1,), dtype="string"), LOOKUP]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_layers_of_a_pipeline_are_found(name: str) -> None:
    dataset = tf.data.Dataset.from_tensor_slices([["a"], ["b"]]).batch(1).map(FUNCTIONS[name]()).prefetch(1)
    other = tf.data.Dataset.range(2)
    assert LOOKUP in layers_of_inputs([tf.data.Dataset.zip((dataset, other)), None])
    assert layers_of_inputs([other.map(lambda n: n + 1), np.ones(3), None]) == []
