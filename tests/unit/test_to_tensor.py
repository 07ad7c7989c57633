"""Arrays become tensors over the same memory only where TensorFlow can work with it."""

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from mpistrat.core.memory import ALIGNMENT, aligned_empty  # noqa: E402
from mpistrat.tensorflow.graph.cpu import to_array, to_tensor  # noqa: E402


@pytest.mark.parametrize("offset", [0, 4, 16])
def test_a_tensor_has_aligned_memory(offset: int) -> None:
    memory = aligned_empty(ALIGNMENT + 16)
    array = memory[offset:offset + 16].view(np.int32)
    array[:] = range(4)
    tensor = to_tensor(array)
    # An operation on memory that is not aligned may abort the process.
    assert to_array(tensor).ctypes.data % ALIGNMENT == 0
    assert (to_array(tensor).ctypes.data == array.ctypes.data) == (offset == 0)
    assert tensor[1:].numpy().tolist() == [1, 2, 3]
