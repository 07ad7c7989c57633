"""The optimizers in an optimizer, and what the private names of Keras say of them."""

import pytest

keras = pytest.importorskip("keras")
hvd = pytest.importorskip("mpistrat.keras")

from mpistrat.keras.bridge.private_names import (  # noqa: E402
    distributed_in,
    optimizers_in,
    parts_of,
    trained_by,
)


def test_parts_are_the_optimizer_and_those_in_it() -> None:
    inner = keras.optimizers.SGD()
    outer = keras.optimizers.LossScaleOptimizer(inner)
    assert list(parts_of(outer)) == [outer, inner]
    assert list(parts_of(None)) == []
    assert distributed_in(outer) == []


def test_optimizers_are_found_in_nested_containers() -> None:
    first, second, third = (keras.optimizers.SGD() for _ in range(3))
    assert list(optimizers_in({"b": [first, (second,)], "a": {"c": third, "d": "no optimizer"}})) == [
        first, second, third]


def test_the_variables_of_a_loss_scale_optimizer_without_a_list_are_those_of_the_optimizer_in_it() -> None:
    inner, variables = keras.optimizers.SGD(), [keras.Variable(1.0)]
    inner.build(variables)
    outer = keras.optimizers.LossScaleOptimizer(inner)
    outer._trainable_variables = []  # As in Keras 3.0.
    assert len(trained_by(outer)) == 1 and trained_by(outer)[0] is variables[0]


def test_a_container_in_itself_is_visited_once() -> None:
    optimizer = keras.optimizers.SGD()
    blocks: list[object] = [{"blocks": None}, optimizer]
    blocks[0]["blocks"] = blocks  # type: ignore[index]
    blocks.append(blocks)
    assert list(optimizers_in(blocks)) == [optimizer]
