"""Where the threads of a process are, in the user's lines."""

import gc
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from mpistrat.process import error_text
from mpistrat.process.procfs import Process

LIMIT_S = 30.0


def wait_here(reached: threading.Event, end: threading.Event) -> None:
    reached.set()
    end.wait(LIMIT_S)


@contextmanager
def waiting(name: str) -> Iterator[None]:
    reached, end = threading.Event(), threading.Event()
    thread = threading.Thread(target=wait_here, args=(reached, end), name=name)
    thread.start()
    assert reached.wait(LIMIT_S)
    yield
    end.set()
    thread.join()


def test_names_of_all_scripts_and_the_last_of_many_frames_are_read(tmp_path: Path) -> None:
    path = tmp_path / "\u00e9 \u4e2d.py"
    path.write_text("def \u00fc(look, n):\n    return \u00fc(look, n - 1) if n else look()\n", encoding="utf-8")
    names: dict = {}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), names)
    frame = f'"{path}", line 2, in \u00fc'
    source = "return \u00fc(look, n - 1) if n else look()"
    assert names["\u00fc"](error_text.main_line, 300) == f"at {frame}: {source}"
    assert names["\u00fc"](error_text.where, 300).startswith("\n".join(
        ["in the main thread:"] + [f"  File {frame}\n    {source}"] * error_text._MOST_FRAMES))


def test_code_without_a_line_number_is_line_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_text, "sys", SimpleNamespace(version_info=(3, 12), _current_frames=sys._current_frames))
    monkeypatch.setattr(error_text.traceback, "walk_stack", lambda frame: iter([(frame.f_back, None)]))
    names: dict = {"look": error_text.main_line}
    exec(compile("def at():\n    return look()", "script.py", "exec"), names)
    assert names["at"]() == 'at "script.py", line 0, in at: '


def test_threads_have_their_names_and_the_lines_of_the_user_but_not_those_of_python() -> None:
    with waiting("loader"), ThreadPoolExecutor(1) as pool:
        begins = threading.Event()

        def ask() -> str:
            begins.wait(LIMIT_S)
            until = time.monotonic() + LIMIT_S
            while "asked.result()" not in (text := error_text.where()) and time.monotonic() < until:
                time.sleep(0.01)
            return text

        asked = pool.submit(ask)
        begins.set()
        text = asked.result()
    assert text.startswith("in the main thread:\n  File ")
    assert (f'File "{__file__}", line {line_of("text = asked.result()")}, in '
            "test_threads_have_their_names_and_the_lines_of_the_user_but_not_those_of_python\n"
            "    text = asked.result()\nin ") in text
    assert (f'\nin thread "loader":\n  File "{__file__}", line {line_of("end.wait(LIMIT_S)")}, in wait_here\n'
            "    end.wait(LIMIT_S)") in text
    assert "threading.py" not in text


def test_the_thread_that_asks_may_be_in_a_collective_of_the_user() -> None:
    assert error_text.where().startswith("in the main thread:\n")
    assert "in test_the_thread_that_asks_may_be_in_a_collective_of_the_user" in error_text.where()


def line_of(text: str) -> int:
    with open(__file__, encoding="utf-8") as file:
        return next(number for number, line in enumerate(file, 1) if text in line)


OUTPUT = [{"pid": 7, "os_thread_id": number, "thread_name": name, "frames": [
    {"name": "wait", "filename": threading.__file__, "line": 3},
    {"name": where, "filename": "/home/me/train.py", "line": number}]} for number, name, where in (
        (9, "loader", "load"), (7, "MainThread", "main"))]


def with_py_spy(directory: Path, monkeypatch: pytest.MonkeyPatch, does: str) -> str:
    """What is said of process 7, the only one that is known, with such a program on the path."""
    program = directory / "py-spy"
    program.write_text(f"#!{sys.executable}\nimport sys, time\n{does}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(directory))
    return error_text.look({3: Process(7, 0, 0, 0)}, 3)


def test_a_process_that_does_not_answer_is_seen_by_py_spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = with_py_spy(tmp_path, monkeypatch, f"assert sys.argv[1:] == ['dump', '--json', '--pid', '7']\n"
                       f"print({json.dumps(OUTPUT)!r})")
    assert text == """
Rank 3 is here, as py-spy sees it, in the main thread:
  File "/home/me/train.py", line 7, in main
in thread "loader":
  File "/home/me/train.py", line 9, in load"""


@pytest.mark.parametrize(("does", "problem"), [
    ("sys.exit('Permission Denied: Try sudo\\nmore\\n')", "Permission Denied: Try sudo"),
    ("sys.exit(4)", "exit code 4"),
    ("print('{}')", "TypeError"),
    ("print('nothing')", "JSONDecodeError"),
    ("time.sleep(60)", "no answer in 0.3 s")])
def test_why_py_spy_does_not_see_it_is_one_line(does: str, problem: str, tmp_path: Path,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_text, "_PY_SPY_LIMIT_S", 0.3 if "sleep" in does else 60.0)
    text = with_py_spy(tmp_path, monkeypatch, does)
    start, text = text[0], text[1:]
    assert start == "\n" and "\n" not in text
    assert text.startswith(f'"py-spy dump --pid 7" does not show where rank 3 is: {problem}')


def test_without_py_spy_the_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    others = {3: Process(7, 0, 0, 0)}
    assert error_text.look(others, 3).startswith('\nTo see where rank 3 is: pip install py-spy, and then ')
    assert error_text.look(others, 4) == '\nTo see where rank 4 is, run "py-spy dump --pid PID" on its host.'


@pytest.mark.skipif(shutil.which("py-spy") is None, reason="py-spy is not installed (pip install py-spy)")
def test_the_real_py_spy_sees_a_process_that_keeps_the_interpreter_lock(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import ctypes\nprint('runs', flush=True)\nctypes.PyDLL(None).sleep(60)  # keeps the lock\n")
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as stuck:
        assert stuck.stdout is not None and stuck.stdout.readline() == b"runs\n"
        try:
            text = error_text.look({1: Process(stuck.pid, 0, 0, 0)}, 1)
        finally:
            stuck.kill()
    if "does not show where rank 1 is: Permission" in text:
        pytest.skip(f"this user may not look at processes:{text}")
    assert f'in the main thread:\n  File "{script}", line 3, in <module>\n    ctypes.PyDLL(None).sleep(60)' in text


def test_a_destructor_that_the_garbage_collector_waits_for_is_named() -> None:
    called, end = threading.Event(), threading.Event()

    class Slow:
        def __del__(self) -> None:
            called.set()
            end.wait(LIMIT_S)

    def collect() -> None:
        cyclic = Slow()
        cyclic.itself = cyclic  # type: ignore[attr-defined]
        del cyclic
        gc.collect()

    assert not error_text.where().endswith(error_text._COLLECTING)
    thread = threading.Thread(target=collect)
    thread.start()
    assert called.wait(LIMIT_S)
    text = error_text.where()
    end.set()
    thread.join()
    assert text.endswith(error_text._COLLECTING)
