"""GPU tensors by way of the host, on a stand-in; tests/parallel/test_gpu_planes.py has what moves them."""

import numpy as np
import pytest

from mpistrat.core.arithmetic import Reduction
from mpistrat.core.errors import EngineError
from mpistrat.core.request import ReduceOp
from mpistrat.gpu.backend import StagedData
from tests.support.gpu_backends import allreduce
from tests.support.gpu_stand_in import Device
from tests.support.thread_group import ThreadGroup


def test_a_copy_that_never_ends_is_an_error() -> None:
    device = Device()
    plane = StagedData(device, 0, ThreadGroup(1).data(0), 0.05)
    source = device.seen(device.tensor(np.ones(3)))
    never = device.record(device.stream())
    never.fire = lambda: False  # type: ignore[method-assign]
    device._streams[-1].work.clear()
    plane.wait_for([never])
    with pytest.raises(EngineError, match=r"a copy between GPU and host is not complete after 0\.05 s"):
        allreduce(plane, [source], [source], Reduction(ReduceOp.SUM))
