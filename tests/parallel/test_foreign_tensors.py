"""Door C on tensors of other libraries: handed over by DLPack, and the result is of the same kind and on its device."""

import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import mpistrat


class Foreign:
    """A tensor of a library that has only what DLPack asks for; `dtype` is what it says."""

    def __init__(self, array: np.ndarray, dtype: str = "float32"):
        self.array, self.dtype = array, dtype

    def __dlpack__(self, **arguments: Any) -> object:
        if self.dtype == "bfloat16":
            raise BufferError("bfloat16 is not in numpy")
        return self.array.__dlpack__(**arguments)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


class InNamespace(Foreign):
    """One that names its namespace, as the array API standard has it."""

    def __array_namespace__(self) -> Any:
        return types.SimpleNamespace(from_dlpack=lambda array: InNamespace(np.from_dlpack(array)))


@pytest.mark.parametrize("kind", ["package", "namespace", "none"])
def test_the_from_dlpack_of_a_library_makes_the_results(kind: str, rank: int, size: int,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    library = types.ModuleType("foreign_library")
    if kind == "package":
        library.from_dlpack = lambda array: Foreign(np.from_dlpack(array))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "foreign_library", library)
    monkeypatch.setattr(Foreign, "__module__", "foreign_library.tensors")
    cls = InNamespace if kind == "namespace" else Foreign
    values = [cls(np.full((2, 3), rank + 1.0, np.float32)), cls(np.array(rank + 1.0, np.float32))]
    for result in mpistrat.grouped_allreduce(values, op=mpistrat.Sum):
        assert type(result) is (np.ndarray if kind == "none" else cls)
        array = result if kind == "none" else result.array
        assert array.dtype == np.float32 and (array == size * (size + 1) / 2).all()


def test_a_dtype_that_numpy_has_not_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(mpistrat.InvalidRequestError, match=r"cannot read Foreign .*no bfloat16\. Cast the"):
        mpistrat.allreduce(Foreign(np.ones(2), "bfloat16"))


class TestTorch:
    @pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
    def torch(self, request: pytest.FixtureRequest) -> Iterator[Any]:
        """The library; tensors are made on a CPU, or on a GPU."""
        torch = pytest.importorskip("torch", reason="torch is not installed")
        device = request.param
        if device == "cuda":
            if not torch.cuda.is_available():
                pytest.skip("torch sees no GPU")
            device = f"cuda:{mpistrat.local_rank() % torch.cuda.device_count()}"
        torch.set_default_device(device)
        yield torch
        torch.set_default_device("cpu")

    @pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "uint8", "int32", "int64"])
    def test_a_sum_is_a_tensor_of_the_same_dtype(self, dtype: str, torch: Any, rank: int, size: int) -> None:
        tensor = (torch.arange(6).reshape(2, 3) + rank).to(getattr(torch, dtype))
        result = mpistrat.allreduce(tensor, op=mpistrat.Sum)
        assert isinstance(result, torch.Tensor) and result.device == tensor.device
        expected = (torch.arange(6).reshape(2, 3) * size + size * (size - 1) // 2).to(tensor.dtype)
        assert result.dtype == tensor.dtype and torch.equal(result, expected)

    def test_a_transposed_tensor_keeps_its_shape(self, torch: Any, rank: int, size: int) -> None:
        tensor = torch.arange(6.0).reshape(2, 3).T + rank
        assert torch.equal(mpistrat.broadcast(tensor, size - 1), torch.arange(6.0).reshape(2, 3).T + size - 1)

    def test_a_scalar_and_an_empty_tensor(self, torch: Any, size: int) -> None:
        assert mpistrat.allreduce(torch.tensor(2.0), op=mpistrat.Sum).item() == 2.0 * size
        assert mpistrat.allreduce(torch.empty(0, 3)).shape == (0, 3)

    def test_the_result_is_the_callers_own(self, torch: Any, size: int) -> None:
        first = mpistrat.allreduce(torch.ones(1000), op=mpistrat.Sum)
        mpistrat.allreduce(torch.zeros(1000), op=mpistrat.Sum)
        assert first.eq(size).all()

    def test_a_tensor_that_needs_gradients_says_what_to_do(self, torch: Any) -> None:
        with pytest.raises(mpistrat.InvalidRequestError, match=r"cannot read Tensor .*detach"):
            mpistrat.allreduce(torch.ones(2, requires_grad=True))


class TestJax:
    @pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
    def numpy(self, request: pytest.FixtureRequest) -> Iterator[Any]:
        """jax's numpy; arrays are made on a CPU, or on a GPU."""
        jax = pytest.importorskip("jax", reason="jax is not installed")
        devices = [device for device in jax.local_devices() if device.platform == request.param]
        if not devices and request.param == "gpu":
            pytest.skip("jax sees no GPU")
        with jax.default_device(devices[mpistrat.local_rank() % len(devices)] if devices else None):
            yield jax.numpy

    @pytest.mark.parametrize("dtype", ["float16", "float32", "int32", "uint8"])
    def test_a_sum_is_an_array_of_the_same_dtype(self, dtype: str, numpy: Any, rank: int, size: int) -> None:
        import jax
        array = numpy.arange(6, dtype=dtype) + rank
        result = mpistrat.allreduce(array, op=mpistrat.Sum)
        assert isinstance(result, jax.Array) and result.dtype == array.dtype and result.device == array.device
        assert result.tolist() == [i * size + size * (size - 1) // 2 for i in range(6)]

    def test_a_result_is_not_changed_later(self, numpy: Any, size: int) -> None:
        first = mpistrat.allreduce(numpy.ones(1000), op=mpistrat.Sum)
        mpistrat.allreduce(numpy.zeros(1000), op=mpistrat.Sum)
        assert (first == size).all()
