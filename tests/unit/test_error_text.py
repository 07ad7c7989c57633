"""What is printed of an uncaught exception: the whole message, the user's frames, and no stacks of frameworks."""

import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest

from mpistrat.core.errors import SettingsError
from mpistrat.process.error_text import ErrorText, describe, is_users, split_message

# TensorFlow's texts, shortened in the number of frames only.
# A report of a stall has lines of other ranks in it. TensorFlow has the text before its stack, and after it.
STALL = """StallError: x: ranks [0] have waited 8 s for ranks [1].
Rank 1 on vm is here, in the main thread:
  File "/home/user/train.py", line 21, in <module>
    time.sleep(10000)

Its last collectives: x (5.4 s ago) The engines have ended after 8 s."""
STALLED = f"""Graph execution error:

Detected at node PyFuncStateless defined at (most recent call last):
  File "/home/user/train.py", line 13, in step

{STALL}
Traceback (most recent call last):

  File "/env/lib/python3.11/site-packages/mpistrat/core/handle.py", line 79, in wait
    raise self._error

mpistrat.core.errors.{STALL}


\t [[{{{{node PyFuncStateless}}}}]] [Op:__inference_step_253]"""
USERS_FUNCTION = """Graph execution error:

Detected at node PyFunc defined at (most recent call last):
<stack traces unavailable>
ValueError: bad record
in file 3
Traceback (most recent call last):

  File "/env/lib/python3.11/site-packages/tensorflow/python/data/ops/from_generator_op.py", line 198, in generator
    values = next(generator_state.get_iterator(iterator_id))

  File "/home/user/train.py", line 21, in records
    raise ValueError("bad record\\nin file 3")
    ^^^^^^^^^^^^^^^^

ValueError: bad record
in file 3


\t [[{{node PyFunc}}]]
\t [[IteratorGetNext]] [Op:__inference_multi_step_on_iterator_233]"""
OPERATION = """Graph execution error:

Detected at node model/embedding_1/GatherV2 defined at (most recent call last):
  File "/home/user/train.py", line 30, in <module>

  File "/env/lib/python3.11/site-packages/keras/src/backend/tensorflow/numpy.py", line 3095, in take

indices[0,0] = 99 is not in [0, 10)
\t [[{{node model/embedding_1/GatherV2}}]] [Op:__inference_multi_step_on_iterator_377]"""
TRACED = """in user code:

    File "/home/user/train.py", line 47, in step  *
        return helper(x)
    File "/home/user/train.py", line 49, in helper  *
        return tf.reshape(x, [7, 7])

    ValueError: Cannot reshape a tensor
      of 1 element
"""


def error_of(text: str, name: str = "InvalidArgumentError", module: str = "tensorflow.errors") -> Exception:
    return type(name, (Exception,), {"__module__": module})(text)


@pytest.mark.parametrize(("error", "message"), [
    (ValueError("one\ntwo"), "ValueError: one\ntwo"),
    (KeyboardInterrupt(), "KeyboardInterrupt"),
    (SettingsError("first\nsecond"), "mpistrat.core.errors.SettingsError: first\nsecond"),
    (error_of(STALLED), f"mpistrat.core.errors.{STALL}"),
    (error_of(USERS_FUNCTION), "ValueError: bad record\nin file 3"),
    (error_of(OPERATION), "tensorflow.errors.InvalidArgumentError: indices[0,0] = 99 is not in [0, 10)\n"
                          "[[{{node model/embedding_1/GatherV2}}]]"),
    (ValueError(TRACED), "ValueError: Cannot reshape a tensor\n  of 1 element"),
    (ValueError("Exception encountered when calling L.call().\n\n\x1b[1mno shape\x1b[0m\n\nArguments: 3"),
     "ValueError: Exception encountered when calling L.call().\n\nno shape\n\nArguments: 3"),
    # A text of the user may look like a traceback. It is not changed.
    (RuntimeError("worker:\nTraceback (most recent call last):\n  File \"a.py\", line 1, in f"),
     "RuntimeError: worker:\nTraceback (most recent call last):\n  File \"a.py\", line 1, in f")])
def test_the_message_is_whole_and_has_no_stack(error: BaseException, message: str) -> None:
    assert split_message(error)[1] == message


def raised(path: Path, source: str) -> ErrorText:
    path.write_text(source)
    try:
        exec(compile(source, str(path), "exec"), {"__name__": "script"})
    except BaseException as error:
        trace = error.__traceback__
        assert trace is not None
        return describe(error, trace.tb_next)
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(("error", "line"), [
    (error_of("`num_parallel_calls` must be either `tf.data.AUTOTUNE` or a value ...", "InvalidArgumentError"),
     "write cycle_length=... or num_parallel_calls=tf.data.AUTOTUNE."),
    (error_of("There appears to be a concurrent caching iterator running - cache lockfile already exists "
              "('a_0.lockfile'). If you are sure ...", "AlreadyExistsError"),
     'dataset.cache(f"{path}-{mpistrat.rank()}")'),
    (error_of("allow_missing_files was set to false and a/c_temp/part-00000-of-00001 did not exist.NOT_FOUND: "
              "a/c_temp/part-00000-of-00001 not found [Op:MergeV2Checkpoints]"), "`if mpistrat.rank() == 0:`"),
    (error_of("... (of type <class 'tensorflow.python.distribute.values.PerReplica'>)"), "strategy.run(step, args=")])
def test_an_error_that_ranks_bring_about_together_gets_the_line_to_write(error: Exception, line: str) -> None:
    first, advice = describe(error, None).message.splitlines()
    assert first.endswith(str(error)) and line in advice


def test_a_module_that_is_missing_names_the_python_and_for_horovod_the_line_to_write() -> None:
    texts = [describe(ModuleNotFoundError(f"No module named {name!r}"), None).message
             for name in ("x", "horovod.keras")]
    assert all(f"(The Python of this rank is {sys.executable}.)" in text for text in texts)
    assert ["--as-horovod" in text and "import mpistrat.keras as hvd" in text for text in texts] == [False, True]


def test_a_frame_of_a_generated_method_is_not_the_users() -> None:
    @dataclass
    class Options:
        kind: str

        def __post_init__(self) -> None:
            raise ValueError(self.kind)

    with pytest.raises(ValueError) as caught:
        Options("int8")
    assert "<string>" not in describe(caught.value, caught.value.__traceback__).frames


def test_the_last_frames_are_those_of_the_user_and_not_of_libraries(tmp_path: Path) -> None:
    library = tmp_path / "site-packages" / "lib.py"
    library.parent.mkdir()
    library.write_text("def call(f):\n    return f()\n")
    script = tmp_path / "train.py"
    text = raised(script, f"""
import json, sys
sys.path.insert(0, {str(library.parent)!r})
import lib
sys.path.pop(0)
def depth(n):
    if n:
        return depth(n - 1)
    lib.call(lambda: json.loads("x"))
depth(5)
""")
    assert text.frames.splitlines() == [
        f'  File "{script}", line 8, in depth', "    return depth(n - 1)",
        f'  File "{script}", line 9, in depth', '    lib.call(lambda: json.loads("x"))',
        f'  File "{script}", line 9, in <lambda>', '    lib.call(lambda: json.loads("x"))']
    assert text.message == "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)"


def test_frames_in_the_text_of_tensorflow_count_too(tmp_path: Path) -> None:
    text = raised(tmp_path / "train.py", f"raise ValueError({TRACED!r})")
    assert text.frames.splitlines() == [
        f'  File "{tmp_path}/train.py", line 1, in <module>', f"    raise ValueError({TRACED!r})",
        '  File "/home/user/train.py", line 47, in step', '  File "/home/user/train.py", line 49, in helper']


def test_frames_of_other_ranks_in_an_error_of_mpistrat_are_not_those_of_the_rank_that_fails() -> None:
    assert describe(error_of(STALLED), None).frames == '  File "/home/user/train.py", line 13, in step'


def test_without_a_frame_of_the_user_there_are_those_of_the_library(tmp_path: Path) -> None:
    (tmp_path / "site-packages").mkdir()
    library = tmp_path / "site-packages" / "lib.py"
    assert raised(library, "import json; json.loads('x')").frames.count("File ") == 3


@pytest.mark.parametrize(("last", "lines"), [
    ("except ValueError:\n    open('/no/file')", [
        "FileNotFoundError: [Errno 2] No such file or directory: '/no/file'", "(raised while handling ValueError: one)",
        "(caused by KeyError: 'name')"]),
    ("except ValueError as error:\n    raise RuntimeError('one\\ntwo') from error",  # Its cause has the same text.
     ["RuntimeError: one", "two", "(caused by KeyError: 'name')"])])
def test_what_an_exception_was_raised_from_is_named(last: str, lines: list[str], tmp_path: Path) -> None:
    text = raised(tmp_path / "train.py", f"""
try:
    try:
        {{}}["name"]
    except KeyError as error:
        raise ValueError("one\\ntwo") from error
{last}
""")
    assert text.message.splitlines() == lines


def test_an_error_in_the_syntax_is_shown_as_python_does(tmp_path: Path) -> None:
    assert raised(tmp_path / "train.py", "exec('f(')").message.endswith("SyntaxError: '(' was never closed")


@pytest.mark.parametrize(("file", "answer"), [
    ("/home/user/train.py", True), ("train.py", True), ("<stdin>", True), ("<frozen runpy>", False),
    (types.__file__, False), ("/env/lib/python3.11/site-packages/keras/a.py", False),
    ("/usr/lib/python3/dist-packages/numpy/a.py", False), ("h5py/_objects.pyx", False),
    ("/tmp/__autograph_generated_file1x.py", False),
    (str(sys.modules[describe.__module__].__file__), False)])
def test_which_files_are_the_users(file: str, answer: bool) -> None:
    assert is_users(file) is answer
