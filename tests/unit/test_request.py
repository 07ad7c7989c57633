"""From a caller's arguments to a Request."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpistrat
from mpistrat.core.errors import InvalidRequestError
from mpistrat.core.request import (
    Adasum,
    Average,
    CollectiveType,
    Max,
    Min,
    Product,
    ReduceOp,
    Request,
    ScaledOp,
    Sum,
    TensorSpec,
    allgather_request,
    allreduce_request,
    broadcast_request,
    reducescatter_request,
    resolve_op,
    specs_of,
)

REAL = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32",
        "float64"]


def spec(dtype: str, *shape: int) -> tuple[TensorSpec]:
    return (TensorSpec(dtype, shape),)


@pytest.mark.parametrize(("op", "average", "expected"), [
    (None, None, Average), (None, True, Average), (None, False, Sum), (Average, None, Average), (Sum, None, Sum),
    (Min, None, Min), (Max, None, Max), (Product, None, Product), (0, None, Average), (1, None, Sum),
    (5, None, Product)])
def test_op_and_average_name_an_operation(op: ReduceOp | int | None, average: bool | None, expected: ReduceOp) -> None:
    assert resolve_op(op, average) is expected


@pytest.mark.parametrize("op, average, text", [
    *((op, flag, "The op parameter supersedes average. Please provide only one of them.")
      for op in (Sum, Average, 0, 99) for flag in (True, False)),
    *((None, flag, f"average must be True, False or None; an operation is given as op=hvd.Sum. Received: {flag!r}")
      for flag in ("no", Sum, 0, [True])),
    *((op, None, f"op must be one of Average, Sum, Min, Max, Product, Adasum. Received: {op!r}{advice}")
      for op, advice in ((6, ""), (-1, ""), (0.5, ""), ([1], ""), ("sum", ". Write op=hvd.Sum, without quotes")))])
def test_a_wrong_op_or_average_is_an_error(op: Any, average: Any, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{re.escape(text)}$"):
        resolve_op(op, average)


@pytest.mark.horovod("dtypes-adasum", "adasum-gpu")
@pytest.mark.parametrize("dtype, device, text", [
    ("int32", "cpu", "Adasum is for floating-point tensors"), ("complex64", "cpu", "Adasum is for floating-point"),
    ("float32", "gpu", "Adasum is computed on the CPU")])
def test_adasum_is_for_floating_point_tensors_on_the_cpu(dtype: str, device: str, text: str) -> None:
    assert resolve_op(2, None) is Adasum
    with pytest.raises(InvalidRequestError, match=text):
        allreduce_request("a", spec(dtype, 2), ScaledOp(Adasum), device=device)


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("op", [Average, Sum, Min, Max, Product])
def test_real_numbers_are_reduced_with_every_operation(dtype: str, op: ReduceOp) -> None:
    tensors = (*spec(dtype, 2, 3), *spec("float32"))
    assert allreduce_request("a", tensors, ScaledOp(op, 2, 0.5)) == \
        Request(CollectiveType.ALLREDUCE, "a", tensors, ScaledOp(op, 2.0, 0.5))


@pytest.mark.parametrize("make", [allreduce_request, reducescatter_request])
def test_factors_that_are_integers_travel_as_floats(make: Callable[..., Request]) -> None:
    request = make("a", spec("float32", 2), ScaledOp(Average, 1, 2))
    assert Request.from_tuple(request.to_tuple()) == request


@pytest.mark.parametrize(("dtype", "allowed", "refused", "remedy"), [
    *((dtype, (Average, Sum, Product), (Min, Max), "") for dtype in ("complex64", "complex128")),
    ("bool", (Min, Max, Product), (Average, Sum), r"\. Cast to int32")])
def test_complex_numbers_have_no_order_and_bool_has_no_sum(
        dtype: str, allowed: tuple[ReduceOp, ...], refused: tuple[ReduceOp, ...], remedy: str) -> None:
    for op in allowed:
        allreduce_request("a", spec(dtype, 2), ScaledOp(op))
    for op in refused:
        with pytest.raises(InvalidRequestError, match=f"^z: {op.name.capitalize()} of {dtype} has no meaning{remedy}"):
            allreduce_request("z", spec(dtype, 2), ScaledOp(op))


@pytest.mark.parametrize("dtype", ["object", "str96", "bytes8", "void16", "datetime64[ns]", "timedelta64[s]",
                                   "StringDType128", "float8_e4m3fn", "int4"])
def test_what_is_no_number_cannot_be_reduced(dtype: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^a: dtype {re.escape(dtype)} cannot be reduced"):
        allreduce_request("a", spec(dtype, 2), ScaledOp(Sum))


def test_every_tensor_of_a_group_is_checked() -> None:
    with pytest.raises(InvalidRequestError, match="object"):
        allreduce_request("a", (*spec("float32"), *spec("object")), ScaledOp(Sum))


@pytest.mark.parametrize("dtype", ["object", "str96", "bytes8", "void16", "StringDType128"])
def test_what_holds_python_objects_or_text_is_not_sent_as_bytes(dtype: str) -> None:
    for make in (lambda: allgather_request("a", spec(dtype, 2)),
                 lambda: broadcast_request("a", spec(dtype, 2), 0, (0,))):
        with pytest.raises(InvalidRequestError, match=rf"^a: dtype {dtype} cannot be sent\. Use broadcast_object or "
                                                      r"allgather_object\."):
            make()


@pytest.mark.parametrize("dtype", [*REAL, "bool", "complex64", "float8_e4m3fn", "datetime64[ns]"])
def test_anything_else_is_sent(dtype: str) -> None:
    assert broadcast_request("a", spec(dtype, 2), 0, (0,)).tensors == spec(dtype, 2)
    assert allgather_request("a", spec(dtype, 2)).tensors == spec(dtype, -1)


def test_ranks_may_bring_any_number_of_rows_to_an_allgather() -> None:
    assert allgather_request("g", spec("int8", 4, 3)) == allgather_request("g", spec("int8", 0, 3))
    assert allgather_request("g", spec("int8", 4, 3)) != allgather_request("g", spec("int8", 4, 2))


def test_a_scalar_cannot_be_gathered() -> None:
    with pytest.raises(InvalidRequestError, match=r"^g: allgather needs at least one dimension, but a rank-zero tensor "
                                                  r"was given\. Reshape it to \(1,\)\."):
        allgather_request("g", spec("float32"))


@pytest.mark.parametrize("root", [-1, 3, 100])
def test_the_root_of_a_broadcast_is_a_rank(root: int) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^b: .*rank {root}; ranks are \[0, 1, 2\]\. .*root_rank=0\.$"):
        broadcast_request("b", spec("float32"), root, range(3))


def test_specs_hold_dtype_name_and_shape() -> None:
    arrays = [np.zeros((2, 0), np.float32), np.array(True), np.zeros(3, ">i4")]
    assert specs_of(arrays) == (TensorSpec("float32", (2, 0)), TensorSpec("bool", ()), TensorSpec("int32", (3,)))


@pytest.mark.parametrize("wrong, text", [([[0, 1]], "must be a ProcessSet"), ("static", "list of ProcessSet")])
def test_what_is_no_process_set_is_refused(wrong: object, text: str) -> None:
    import mpistrat
    try:
        with pytest.raises(InvalidRequestError, match=text):
            mpistrat.init(process_sets=wrong)
    finally:
        mpistrat.shutdown()


@pytest.mark.parametrize("splits", [[2**32 + 1], np.array([-2**31 - 1]), np.array([2**31], np.uint32), [1.0], ["1"],
                                    [True]], ids=str)
def test_splits_that_are_no_integers_of_32_bits_are_refused(splits: object) -> None:
    mpistrat.init()
    with pytest.raises(InvalidRequestError, match=r"alltoall: the splits of an alltoall must be 32-bit integers. Rec"):
        mpistrat.alltoall(np.zeros((2, 1)), splits)
    with pytest.raises(InvalidRequestError, match="32-bit integers"):  # They are even, and they are too large.
        mpistrat.alltoall(np.empty((2**31, 0)))
    assert mpistrat.alltoall(np.zeros((2, 1)), np.array([1], np.uint8))[1].dtype == np.int32


@pytest.mark.parametrize("name", [5, b"a", ("a",), "", 0, False], ids=repr)
def test_names_that_are_no_strings_are_refused(name: object) -> None:
    mpistrat.init()
    for call, args in ((mpistrat.allreduce, (1,)), (mpistrat.allreduce_async, (1,)), (mpistrat.barrier, ()),
                       (mpistrat.grouped_allreduce, ([],)), (mpistrat.broadcast_object, (1,)),
                       (mpistrat.allgather_object, (1,)), (mpistrat.alltoall_async, ([1],))):
        with pytest.raises(InvalidRequestError, match=r": name must be None or a string that is not empty. Received: "):
            call(*args, name=name)
    assert mpistrat.allreduce(1.0, name=np.str_("numpy")) == 1.0
