"""What a rank that has joined gives to the collectives of the others."""

import numpy as np
import pytest

from mpistrat.core.arithmetic import IDENTITY, combine
from mpistrat.core.errors import EngineError
from mpistrat.core.request import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    ReduceOp,
    ScaledOp,
    Sum,
    TensorSpec,
    allgather_request,
    allreduce_request,
    broadcast_request,
)
from mpistrat.engine.executor import neutral_arrays

DTYPES = ["int8", "uint8", "int32", "uint64", "float16", "float32", "float64"]
VALUES = [-3, 0, 1, 77]


@pytest.mark.parametrize("op", [Sum, Average, Min, Max, Product])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_reduction_does_not_change(op: ReduceOp, dtype: str) -> None:
    values = np.array(VALUES if dtype[0] != "u" else VALUES[1:], dtype)
    neutral, = neutral_arrays(allreduce_request("a", (TensorSpec(dtype, values.shape),), ScaledOp(op)))
    assert neutral.dtype == values.dtype
    assert neutral.shape == values.shape
    for parts in ([values, neutral], [neutral, values]):
        result = np.empty_like(values)
        combine(parts, Sum if op is Average else op, result, IDENTITY)
        np.testing.assert_array_equal(result, values)


@pytest.mark.parametrize(("dtype", "op", "neutral"), [
    ("bool", Min, True), ("bool", Max, False), ("bool", Product, True), ("float32", Adasum, 0)])
def test_a_reduction_of_bool_and_adasum_do_not_change(dtype: str, op: ReduceOp, neutral: object) -> None:
    found, = neutral_arrays(allreduce_request("a", (TensorSpec(dtype, (2,)),), ScaledOp(op)))
    assert found.tolist() == [neutral, neutral]


@pytest.mark.parametrize("op", [Min, Max])
def test_infinite_values_stay(op: ReduceOp) -> None:
    values = np.array([np.inf, -np.inf, np.nan])
    neutral, = neutral_arrays(allreduce_request("a", (TensorSpec("float64", (3,)),), ScaledOp(op)))
    result = np.empty(3)
    combine([values, neutral], op, result, IDENTITY)
    np.testing.assert_array_equal(result, values)


def test_concatenated_tensors_are_one_array() -> None:
    tensors = (TensorSpec("float64", (5,)), TensorSpec("float32", ()), TensorSpec("float32", (2, 3)))
    arrays = neutral_arrays(allreduce_request("a", tensors, ScaledOp(Sum), layout=((1,), (2, 0))))
    assert [(array.size, array.dtype) for array in arrays] == [(5, np.float64), (7, np.float32)]


def test_a_broadcast_gets_room_for_what_it_sends_and_an_allgather_no_rows() -> None:
    tensors = (TensorSpec("int16", (4, 3)),)
    assert neutral_arrays(broadcast_request("a", tensors, 0, (0, 1)))[0].nbytes == 24
    assert neutral_arrays(allgather_request("a", tensors))[0].shape == (0, 3)


def test_a_dtype_that_numpy_does_not_know_is_named() -> None:
    with pytest.raises(EngineError, match=r"a: this rank waits in join.*Import ml_dtypes.* Received: float7"):
        neutral_arrays(broadcast_request("a", (TensorSpec("float7", (1,)),), 0, (0, 1)))
