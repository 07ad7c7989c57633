"""TensorFlow's memory on the host in place of a GPU's, so that its tensors go the way of GPU tensors without one."""

import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from mpistrat.api import tensors as gpu_tensors
from mpistrat.tensorflow.async_op import call_site, streams
from mpistrat.tensorflow.graph import xla_collective
from mpistrat.tensorflow.xla import context, custom_call
from tests.support import gpu_stand_in


class Device(gpu_stand_in.Device):
    """Takes TensorFlow's memory on the host for the GPU's.

    TensorFlow's work on the host is over before its next work begins. So there a stream that waits for an event is a
    thread that does. Whoever asks for the event next, once, is told what was so before the wait.
    """

    def write_number(self, address: int, number: int, words: int, stream: gpu_stand_in.Stream) -> None:
        super().write_number(address, number, words, stream)
        self.synchronize(stream)

    def wait(self, stream: gpu_stand_in.Stream, event: gpu_stand_in.Event) -> None:
        if stream is not self._user:
            super().wait(stream, event)
        else:
            was_done = event.done
            while not event.done:
                time.sleep(1e-5)
            event.is_late = not was_done


def install(rank: int, replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Let all tensors of this process go the way of GPU tensors: eager ones, those of graphs, and XLA's."""
    def place_of(call: Any) -> tuple[Device, gpu_stand_in.Stream]:
        device: Any = gpu_tensors.this_ranks_gpu(0)
        return device, device.current_stream()

    replace(gpu_tensors, "make_device", lambda number: Device(seed=rank))
    replace(streams, "check", lambda *_: None)  # TensorFlow's work is over when the check comes to it.
    replace(streams, "ContextStream", lambda device, where: device.stream())
    replace(streams, "stream_of_handler", lambda device, where: device.current_stream())
    replace(call_site, "are_on_gpu", lambda tensors, process_set=0: True)
    replace(call_site, "device_of", lambda tensors, process_set=0: None if tf.executing_eagerly() or
            context.is_compiled() else "/device:CPU:0")
    replace(xla_collective, "has_gpu", lambda: True)
    replace(custom_call, "place_of", place_of)
