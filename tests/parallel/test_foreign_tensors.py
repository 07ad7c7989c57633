"""Door C on tensors of torch and jax: handed over by DLPack, and the result is of the same kind and on its device."""

from collections.abc import Iterator
from typing import Any

import pytest

import mpistrat


class TestTorch:
    """torch's tensors."""

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

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64"])
    def test_a_sum_is_a_tensor_of_the_same_dtype(self, dtype: str, torch: Any, rank: int, size: int) -> None:
        tensor = (torch.arange(6).reshape(2, 3) + rank).to(getattr(torch, dtype))
        result = mpistrat.allreduce(tensor, op=mpistrat.Sum)
        assert isinstance(result, torch.Tensor) and result.device == tensor.device
        expected = (torch.arange(6).reshape(2, 3) * size + size * (size - 1) // 2).to(tensor.dtype)
        assert result.dtype == tensor.dtype and torch.equal(result, expected)

    def test_a_group_of_gradients_is_averaged(self, torch: Any, rank: int, size: int) -> None:
        weights = [torch.ones(3, 2, requires_grad=True), torch.ones(2, requires_grad=True)]
        (rank * sum(w.sum() for w in weights)).backward()
        for weight, average in zip(weights, mpistrat.grouped_allreduce([w.grad for w in weights])):
            weight.grad.copy_(average)
            assert torch.equal(weight.grad, torch.full_like(weight, (size - 1) / 2))

    def test_a_transposed_tensor_keeps_its_shape(self, torch: Any, rank: int, size: int) -> None:
        tensor = torch.arange(6.0).reshape(2, 3).T + rank
        assert torch.equal(mpistrat.broadcast(tensor, size - 1), torch.arange(6.0).reshape(2, 3).T + size - 1)

    def test_rows_are_gathered(self, torch: Any, rank: int, size: int) -> None:
        result = mpistrat.allgather(torch.full((rank + 1, 2), rank))
        assert result.tolist() == [[r, r] for r in range(size) for _ in range(r + 1)]

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
    """jax's arrays."""

    @pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
    def numpy(self, request: pytest.FixtureRequest) -> Iterator[Any]:
        """jax's numpy; arrays are made on a CPU, or on a GPU."""
        jax = pytest.importorskip("jax", reason="jax is not installed")
        devices = [device for device in jax.local_devices() if device.platform == request.param]
        if not devices and request.param == "gpu":
            pytest.skip("jax sees no GPU")
        with jax.default_device(devices[mpistrat.local_rank() % len(devices)] if devices else None):
            yield jax.numpy

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int32", "uint8"])
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
