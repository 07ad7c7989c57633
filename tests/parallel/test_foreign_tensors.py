"""Door C on CPU tensors of torch and jax: handed over by DLPack, and the result is of the same kind."""

from typing import Any

import pytest

import mpistrat


class TestTorch:
    """torch's tensors."""

    @pytest.fixture
    def torch(self) -> Any:
        return pytest.importorskip("torch", reason="torch is not installed")

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64"])
    def test_a_sum_is_a_tensor_of_the_same_dtype(self, dtype: str, torch: Any, rank: int, size: int) -> None:
        tensor = (torch.arange(6).reshape(2, 3) + rank).to(getattr(torch, dtype))
        result = mpistrat.allreduce(tensor, op=mpistrat.Sum)
        assert isinstance(result, torch.Tensor)
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

    @pytest.fixture
    def numpy(self) -> Any:
        return pytest.importorskip("jax.numpy", reason="jax is not installed")

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int32", "uint8"])
    def test_a_sum_is_an_array_of_the_same_dtype(self, dtype: str, numpy: Any, rank: int, size: int) -> None:
        import jax
        array = numpy.arange(6, dtype=dtype) + rank
        result = mpistrat.allreduce(array, op=mpistrat.Sum)
        assert isinstance(result, jax.Array) and result.dtype == array.dtype
        assert result.tolist() == [i * size + size * (size - 1) // 2 for i in range(6)]

    def test_a_result_is_not_changed_later(self, numpy: Any, size: int) -> None:
        first = mpistrat.allreduce(numpy.ones(1000), op=mpistrat.Sum)
        mpistrat.allreduce(numpy.zeros(1000), op=mpistrat.Sum)
        assert (first == size).all()
