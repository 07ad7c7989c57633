"""The structures of XLA's FFI have the layout of its header, and errors cross the boundary as text and code."""

import ctypes
import math
import os
import re
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from mpistrat.core import signal_handlers  # noqa: E402
from mpistrat.core.errors import EngineError, MismatchError  # noqa: E402
from mpistrat.core.handle import Handle  # noqa: E402
from mpistrat.tensorflow.bridge.tf_errors import described  # noqa: E402
from mpistrat.tensorflow.graph import xla_collective  # noqa: E402
from mpistrat.tensorflow.xla import custom_call, ffi  # noqa: E402

HEADER = os.path.join(tf.sysconfig.get_include(), "xla/ffi/api/c_api.h")
needs_ffi = pytest.mark.skipif(ffi.api() is None, reason="this TensorFlow does not export XLA's FFI")
needs_header = pytest.mark.skipif(ffi.api() is None or not os.path.exists(HEADER), reason="no FFI, or no headers of it")

# The names of the structures in the header, and of those fields that have another name there.
STRUCTURES = {
    "XLA_FFI_ByteSpan": ffi.ByteSpan, "XLA_FFI_Api_Version": ffi.Version, "XLA_FFI_Metadata": ffi.Metadata,
    "XLA_FFI_Buffer": ffi.Buffer, "XLA_FFI_Args": ffi.Buffers, "XLA_FFI_Rets": ffi.Buffers,
    "XLA_FFI_Scalar": ffi.Scalar, "XLA_FFI_Attrs": ffi.Attributes, "XLA_FFI_CallFrame": ffi.CallFrame,
    "XLA_FFI_Handler_Bundle": ffi.Bundle, "XLA_FFI_Handler_Register_Args": ffi.RegisterArgs,
    "XLA_FFI_Error_Create_Args": ffi.ErrorCreateArgs, "XLA_FFI_Error_GetMessage_Args": ffi.ErrorMessageArgs,
    "XLA_FFI_Error_Destroy_Args": ffi.ErrorDestroyArgs, "XLA_FFI_Future_Create_Args": ffi.FutureCreateArgs,
    "XLA_FFI_Future_SetAvailable_Args": ffi.FutureAvailableArgs, "XLA_FFI_Future_SetError_Args": ffi.FutureErrorArgs,
}
RENAMED = {"major_version": "major", "minor_version": "minor", "api_version": "version", "args": "buffers",
           "rets": "buffers", "errc": "code"}


def fields_in_header(structure: str) -> list[str]:
    with open(HEADER) as file:
        text = re.sub(r"//.*", "", file.read())
    body = re.search(rf"struct {structure} {{(.*?)}}", text, re.DOTALL)
    return re.findall(r"(\w+)\s*;", body[1])


@needs_header
@pytest.mark.parametrize("name", STRUCTURES)
def test_the_fields_are_those_of_the_header(name: str) -> None:
    own = [field[0] for field in STRUCTURES[name]._fields_]
    is_nested = name in ("XLA_FFI_CallFrame",)
    theirs = [field if is_nested and field in own else RENAMED.get(field, field) for field in fields_in_header(name)]
    assert own == theirs[:len(own)]
    assert len(theirs) - len(own) == (1 if name == "XLA_FFI_Metadata" else 0)  # A state, which our handler has not.


@needs_header
def test_the_functions_are_those_of_the_header_in_order() -> None:
    with open(HEADER) as file:
        names = re.findall(r"_XLA_FFI_API_STRUCT_FIELD\(XLA_FFI_(\w+)\)", file.read())
    known = {"error_create": "Error_Create", "error_message": "Error_GetMessage", "error_destroy": "Error_Destroy",
             "handler_register": "Handler_Register", "future_create": "Future_Create",
             "future_available": "Future_SetAvailable", "future_error": "Future_SetError"}
    for place, name in enumerate(ffi._FUNCTIONS):
        assert known.get(name, names[place]) == names[place]


def test_sizes_on_64_bits() -> None:
    assert ctypes.sizeof(ffi.Version) == 24
    assert ctypes.sizeof(ffi.Buffer) == 48
    assert ctypes.sizeof(ffi.CallFrame) == 40 + 2 * 40 + 48 + 8
    assert ctypes.sizeof(ffi.RegisterArgs) == 16 + 32 + 32 + 8


@needs_ffi
def test_an_error_of_the_api_is_raised_with_its_text() -> None:
    custom_call._targets.add(Doubled(False))
    with pytest.raises(RuntimeError, match=r"handler_register of .* has failed: .*mpistrat"):
        ffi.register("mpistrat", "Host", lambda call: None)  # There is one of this name.


@pytest.mark.parametrize(("error", "code"), [
    (MismatchError("shapes"), tf.errors.FAILED_PRECONDITION), (EngineError("ended"), tf.errors.UNKNOWN),
    (ZeroDivisionError("by zero"), tf.errors.UNKNOWN)], ids=["mismatch", "engine", "python"])
def test_errors_have_the_codes_of_the_classes_that_horovod_raises(error: Exception, code: int) -> None:
    assert described(error) == (f"{type(error).__name__}: {error}", code)


class Doubled:
    """A target that doubles its argument, at once or later, and fails if that is not positive."""

    def __init__(self, is_late: bool):
        self.is_late = is_late

    def execute(self, call: ffi.Call) -> None:
        value, result = call.arguments([np.float32])[0], call.results([np.float32])[0]
        if self.is_late:
            future = call.complete_later()
            if np.all(value > 0):
                result[...] = 2 * value
                future.set_available()
            else:
                future.set_error("not positive", tf.errors.OUT_OF_RANGE)
        elif np.all(value > 0):
            result[...] = 2 * value
        else:
            raise ValueError("not positive")


@needs_ffi
@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "later"])
def test_a_call_has_results_and_errors(is_late: bool) -> None:
    target = Doubled(is_late)

    @tf.function(jit_compile=True, autograph=False)
    def step(x: Any) -> Any:
        return custom_call.custom_call(target, [tf.transpose(x)], [tf.float32], [tf.transpose(x).shape])[0] + 1.0

    x = tf.reshape(tf.range(1.0, 7.0), [2, 3])
    np.testing.assert_array_equal(step(x), 2 * np.transpose(x) + 1)
    with pytest.raises(tf.errors.OutOfRangeError if is_late else tf.errors.UnknownError, match="not positive"):
        step(-x)
    np.testing.assert_array_equal(step(x), 2 * np.transpose(x) + 1)


@needs_ffi
def test_a_target_that_is_gone_is_an_error_and_no_crash() -> None:
    target = Doubled(False)

    @tf.function(jit_compile=True, autograph=False)
    def step(x: Any) -> Any:
        return custom_call.custom_call(target, [x], [tf.float32], [x.shape])[0]

    step(tf.ones([2]))
    numbers = [number for number, known in custom_call._targets.items() if known is target]
    del custom_call._targets[numbers[0]]
    with pytest.raises(tf.errors.UnknownError, match=r"because the compiled tf\.function that contains it was deleted"):
        step(tf.ones([2]))


@pytest.mark.parametrize("raised", [SystemExit, RuntimeError, KeyboardInterrupt])
def test_what_signal_handlers_raise_comes_when_the_collective_no_longer_writes_to_the_memory(
        raised: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    handle, broken_off = Handle("a"), []
    site: Any = SimpleNamespace(name="a", process_set=0, raised=None)

    def handler(*_: object) -> None:
        raise raised

    def interrupt_twice_and_complete() -> None:
        for _ in range(2):
            site.raised = None
            while not handle._waiters:
                time.sleep(0.001)
            handle._waiters.clear()
            signal.pthread_kill(main, signal.SIGUSR1)
            while site.raised is None:
                time.sleep(0.001)
        handle.complete([])

    monkeypatch.setattr(signal_handlers, "_next_look_at", math.inf)  # There is a handler, and that is known.
    monkeypatch.setattr(signal_handlers, "_found", True)
    engine = SimpleNamespace(break_off=broken_off.append)
    monkeypatch.setattr(xla_collective.runtime, "group_of", lambda *_: SimpleNamespace(engine=engine))
    before, main = signal.signal(signal.SIGUSR1, handler), threading.get_ident()
    thread = threading.Thread(target=interrupt_twice_and_complete)
    try:
        thread.start()
        xla_collective._await(site, handle)
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert handle.is_done and type(site.raised) is raised
    assert broken_off == ["a: Ctrl-C interrupted the collective on a rank."] * (2 if raised is KeyboardInterrupt else 0)
