"""Where the threads of a process are, in the user's lines."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from mpistrat.process import stacks

LIMIT_S = 30.0


def wait_here(reached: threading.Event, end: threading.Event) -> None:
    reached.set()
    end.wait(LIMIT_S)


@contextmanager
def waiting(name: str) -> Iterator[None]:
    """A thread that waits in `wait_here`."""
    reached, end = threading.Event(), threading.Event()
    thread = threading.Thread(target=wait_here, args=(reached, end), name=name)
    thread.start()
    assert reached.wait(LIMIT_S)
    yield
    end.set()
    thread.join()


def test_threads_have_their_names_and_the_lines_of_the_user_but_not_those_of_python() -> None:
    with waiting("loader"), ThreadPoolExecutor(1) as pool:
        begins = threading.Event()

        def ask() -> str:
            begins.wait(LIMIT_S)
            until = time.monotonic() + LIMIT_S
            while "asked.result()" not in (text := stacks.where()) and time.monotonic() < until:
                time.sleep(0.01)
            return text

        asked = pool.submit(ask)
        begins.set()
        text = asked.result()
    main, _, loader = text.partition('\nin thread "loader":\n')
    assert main.startswith("in the main thread:\n  File ")
    assert main.endswith(f'File "{__file__}", line {line_of("text = asked.result()")}, in '
                         "test_threads_have_their_names_and_the_lines_of_the_user_but_not_those_of_python\n"
                         "    text = asked.result()")
    assert loader == (f'  File "{__file__}", line {line_of("end.wait(LIMIT_S)")}, in wait_here\n'
                      "    end.wait(LIMIT_S)")
    assert "threading.py" not in text


def test_the_thread_that_asks_is_left_out() -> None:
    assert "in the main thread" not in stacks.where()


def line_of(text: str) -> int:
    """The number of the first line of this file with a text."""
    with open(__file__, encoding="utf-8") as file:
        return next(number for number, line in enumerate(file, 1) if text in line)
