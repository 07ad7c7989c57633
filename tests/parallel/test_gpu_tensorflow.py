"""TensorFlow's eager tensors on the way for GPU tensors: on a real GPU where there is one, and else with its memory for
that of a stand-in."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import mpistrat
from mpistrat import tensor_kinds
from tests import gpu_stand_in

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")


class StandIn(gpu_stand_in.Device):
    """Takes TensorFlow's memory on the host for the GPU's."""

    def imported(self, tensor: Any) -> tuple[Any, Any]:
        return np.asarray(memoryview(tensor)) if tensor.shape.num_elements() else tensor.numpy(), self.record()

    def seen(self, array: Any) -> Any:
        return gpu_stand_in.GpuArray(array.ctypes.data, array.shape, array.dtype, array)


@pytest.fixture(params=["stand-in", pytest.param("GPU", marks=[
    pytest.mark.gpu, pytest.mark.skipif(not tf.config.list_physical_devices("GPU"), reason="TensorFlow sees no GPU")])])
def hvd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, rank: int) -> Iterator[Any]:
    """mpistrat.tensorflow, whose eager tensors go the way of GPU tensors."""
    import mpistrat.tensorflow as hvd
    from mpistrat.tensorflow import gpu_bridge
    mpistrat.shutdown()
    mpistrat.init()
    if request.param == "stand-in":
        monkeypatch.setattr(tensor_kinds, "make_device", lambda number: StandIn(seed=rank))
        monkeypatch.setattr(gpu_bridge, "are_on_gpu", lambda tensors: True)
        yield hvd
    else:
        gpus = tf.config.list_logical_devices("GPU")
        with tf.device(gpus[rank % len(gpus)].name):
            yield hvd
    mpistrat.shutdown()
    mpistrat.init()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int64"])
def test_a_sum_is_a_tensor_on_the_same_device(dtype: str, hvd: Any, rank: int, size: int) -> None:
    tensor = tf.cast(tf.range(6.0) + float(rank), dtype)
    result = hvd.allreduce(tensor, op=hvd.Sum)
    assert (result.dtype, result.device) == (tensor.dtype, tensor.device)
    np.testing.assert_array_equal(result.numpy(), np.arange(6) * size + size * (size - 1) // 2)


def test_a_group_is_averaged(hvd: Any, rank: int, size: int) -> None:
    results = hvd.grouped_allreduce([tf.fill([count], float(rank)) for count in (1, 500, 3)])
    assert [result.shape.as_list() for result in results] == [[1], [500], [3]]
    for result in results:
        np.testing.assert_array_equal(result.numpy(), np.full(result.shape, (size - 1) / 2))


def test_rows_are_gathered(hvd: Any, rank: int, size: int) -> None:
    result = hvd.allgather(tf.fill([rank + 1, 2], float(rank)))
    assert result.numpy().tolist() == [[r, r] for r in range(size) for _ in range(r + 1)]


def test_broadcast(hvd: Any, rank: int, size: int) -> None:
    result = hvd.broadcast(tf.fill([2, 3], float(rank)), size - 1)
    np.testing.assert_array_equal(result.numpy(), np.full((2, 3), size - 1))
