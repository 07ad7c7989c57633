"""Whether all threads of a process wait for each other: what Linux says, and real threads."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mpistrat.core.errors import EngineError
from mpistrat.core.handle import Entry, Handle
from mpistrat.core.request import CollectiveType, Request
from mpistrat.engine import parked
from mpistrat.engine.parked import ENGINE_THREAD, WATCH_THREAD, ThreadScan, ThreadWait, threads_of_libraries, wait_of
from mpistrat.engine.queue import TensorQueue

from ..support.system_calls import needs_system_calls

REST = "0x0 0xffffffff 0x7f283a39eaa0 0x7f283a8a3f16"


@pytest.mark.parametrize(("text", "expected"), [
    (f"202 0x562608615b70 0x189 0x0 0x0 {REST}", ThreadWait.UNLIMITED),  # a lock of Python's
    (f"202 0x562608615b70 0x80 0x2 0x0 {REST}", ThreadWait.UNLIMITED),  # a mutex
    (f"202 0x562608615b70 0x89 0x0 0x7f2839b9d9f0 {REST}", ThreadWait.LIMITED),
    (f"202 0x562608615b70 0x80 0x0 0x7f2839b9d9f0 {REST}", ThreadWait.LIMITED),
    (f"202 0x562608615b70 0x109 0x0 0x0 {REST}", ThreadWait.NOT),  # a semaphore that processes share
    (f"202 0x562608615b70 0x81 0x1 0x0 {REST}", ThreadWait.NOT),  # it wakes another thread
    (f"230 0x1 0x1 0x7f2839398ab0 0x0 {REST}", ThreadWait.LIMITED),  # clock_nanosleep
    (f"35 0x7f2839398ab0 0x0 0x0 0x0 {REST}", ThreadWait.LIMITED),  # nanosleep
    (f"232 0x4 0x5603bc46e390 0x20 0xffffffffffffffff {REST}", ThreadWait.NOT),  # epoll_wait
    (f"0 0x3 0x5626086f4410 0x2000 0x1000 {REST}", ThreadWait.NOT),  # read
    (f"98 0x562608615b70 0x189 0x0 0x0 {REST}", ThreadWait.NOT),  # futex on another processor
    ("-1 0x7f283a39eaa0 0x7f283a8a3f16", ThreadWait.NOT),  # it waits for a page of memory
    ("running", ThreadWait.NOT)])
def test_a_thread_waits_for_another_one_in_one_system_call_only(text: str, expected: ThreadWait) -> None:
    assert wait_of(text + "\n", "x86_64") is expected


def test_other_processors_have_other_numbers_or_are_not_known() -> None:
    wait = f"0x562608615b70 0x189 0x0 0x0 {REST}"
    assert wait_of(f"98 {wait}", "aarch64") is ThreadWait.UNLIMITED
    assert wait_of(f"115 {wait}", "aarch64") is ThreadWait.LIMITED
    assert wait_of(f"202 {wait}", "aarch64") is ThreadWait.NOT
    assert wait_of(f"202 {wait}", "s390x") is ThreadWait.NOT


# -- invented threads -------------------------------------------------------------------------------------------------


class Tasks:
    """A directory like /proc/self/task, with threads that Python knows nothing of."""

    def __init__(self, path: Path):
        self.path = path
        self.scan = ThreadScan(path, "x86_64")
        self.put(10**8, f"202 0x1 0x189 0x0 0x0 {REST}", 7, 3)
        self.put(10**8 + 1, f"202 0x2 0x189 0x0 0x0 {REST}", 4, 0)

    def put(self, thread: int, call: str, voluntary: int, other: int) -> None:
        """A thread in a system call, which has run so often."""
        directory = self.path / str(thread)
        directory.mkdir(exist_ok=True)
        (directory / "syscall").write_text(call + "\n")
        (directory / "status").write_text(f"Name:\tpython\nvoluntary_ctxt_switches:\t{voluntary}\n"
                                          f"nonvoluntary_ctxt_switches:\t{other}\n")


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tasks:
    """Invented threads. Those that pytest-xdist has started, which Python's threading does not know, are left out."""
    real = sys._current_frames
    others = real().keys() - {thread.ident for thread in threading.enumerate()}
    monkeypatch.setattr(sys, "_current_frames",
                        lambda: {thread: frame for thread, frame in real().items() if thread not in others})
    return Tasks(tmp_path)


def test_a_look_has_how_often_each_thread_has_run(tasks: Tasks) -> None:
    me = threading.get_native_id()
    assert tasks.scan.look() == {me: 0, 10**8: 10, 10**8 + 1: 4}
    tasks.put(10**8, f"202 0x1 0x189 0x0 0x0 {REST}", 8, 3)
    assert tasks.scan.look() == {me: 0, 10**8: 11, 10**8 + 1: 4}


def test_a_thread_that_does_something_is_enough(tasks: Tasks) -> None:
    tasks.put(10**8 + 1, "running", 4, 0)
    assert tasks.scan.look() is None


def test_how_often_a_library_wakes_up_by_itself_does_not_matter(tasks: Tasks) -> None:
    for times in (1, 2):
        tasks.put(10**8, f"202 0x1 0x80 0x0 0x7f2839b9d9f0 {REST}", times, 0)
        assert tasks.scan.look() == {threading.get_native_id(): 0, 10**8: 0, 10**8 + 1: 4}


def test_another_caller_is_another_state(tasks: Tasks) -> None:
    seen: list[object] = [tasks.scan.look()]
    thread = threading.Thread(target=lambda: seen.append(tasks.scan.look()))
    thread.start()
    thread.join()
    assert None not in seen
    assert seen[0] != seen[1]


def test_threads_of_mpi_do_not_count(tasks: Tasks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parked, "_TASKS", tasks.path)
    monkeypatch.setattr(parked, "_of_libraries", set())
    with contextlib.suppress(EngineError), threads_of_libraries():
        tasks.put(10**8 + 2, f"232 0x4 0x5603bc46e390 0x20 0xffffffffffffffff {REST}", 1, 0)
        raise EngineError("The connection has failed. MPI's threads stay.")
    assert tasks.scan.look() == {threading.get_native_id(): 0, 10**8: 10, 10**8 + 1: 4}
    tasks.put(10**8 + 3, f"232 0x4 0x5603bc46e390 0x20 0xffffffffffffffff {REST}", 1, 0)
    assert tasks.scan.look() is None


def test_threads_that_only_watch_do_not_count(tasks: Tasks) -> None:
    end = threading.Event()
    for name in (ENGINE_THREAD, WATCH_THREAD):
        thread = threading.Thread(target=end.wait, args=(60,), name=name, daemon=True)
        thread.start()
        tasks.put(thread.native_id or 0, "running", 1, 0)
    assert tasks.scan.look() == {threading.get_native_id(): 0, 10**8: 10, 10**8 + 1: 4}
    other = threading.Thread(target=end.wait, args=(60,), daemon=True)
    other.start()
    tasks.put(other.native_id or 0, f"202 0x1 0x89 0x0 0x7f2839b9d9f0 {REST}", 1, 0)
    assert tasks.scan.look() is None
    end.set()


def test_where_linux_does_not_give_the_calls_no_process_is_parked(tasks: Tasks, tmp_path: Path) -> None:
    (tmp_path / str(10**8) / "syscall").unlink()
    assert tasks.scan.look() is None
    (tmp_path / str(10**8) / "syscall").write_text("")
    assert tasks.scan.look() is None
    assert ThreadScan(tmp_path, "another processor").look() is None


def test_a_signal_handler_may_end_a_wait(tasks: Tasks) -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        assert tasks.scan.look() is None
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert tasks.scan.look() is not None


# -- real threads -----------------------------------------------------------------------------------------------------


def looks_while(wait: Callable[[], object], end: Callable[[], object], in_graph: bool = False) -> list[bool]:
    """Whether the process is parked while the main thread waits, by two looks, and that no thread ran between them.

    Meanwhile a collective is in flight, of a graph or not.
    """
    found: list[bool] = []

    def look() -> None:
        scan = ThreadScan()
        scan.queues.append(TensorQueue())
        scan.queues[0].put(Entry(Request(CollectiveType.BARRIER, "b", in_graph=in_graph), [], Handle("b")))
        time.sleep(0.2)  # The main thread waits now.
        first, _, second = scan.look(), time.sleep(0.1), scan.look()
        found.extend((first is not None, first == second))
        end()

    thread = threading.Thread(target=look)
    thread.start()
    wait()
    thread.join()
    return found


def all_looks() -> dict[str, list[bool]]:
    """By the name of a wait. Runs in a process of its own, which has no other threads."""
    lock, event, items = threading.Lock(), threading.Event(), queue.Queue[int]()
    source, sink = os.pipe()
    done, handle = threading.Event(), Handle("a collective")
    looks = {
        # As a call of a library that waits for one of its threads: Python cannot tell them apart.
        "library": looks_while(lambda: (lock.acquire(), lock.acquire()), lock.release),
        "library, in a graph": looks_while(lambda: (lock.acquire(False), lock.acquire()), lock.release, in_graph=True),
        "handle": looks_while(handle.wait, lambda: handle.complete([])),
        "event": looks_while(event.wait, event.set),
        "queue": looks_while(items.get, lambda: items.put(1)),
        "sleep": looks_while(lambda: time.sleep(1.0), lambda: None),
        "event with a limit": looks_while(lambda: done.wait(1.0), lambda: None),
        "pipe": looks_while(lambda: os.read(source, 1), lambda: os.write(sink, b"x")),
        "process": looks_while(lambda: subprocess.run(["sleep", "1"], check=True), lambda: None),
    }
    end = threading.Event()
    looks["work"] = looks_while(lambda: [sum(range(1000)) for _ in iter(end.is_set, True)], end.set)
    idle = threading.Thread(target=queue.Queue[int]().get, daemon=True)
    idle.start()
    event.clear()
    looks["event, and an idle thread"] = looks_while(event.wait, event.set)
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    event.clear()
    looks["event, and a thread that sleeps"] = looks_while(event.wait, event.set)
    return looks


@needs_system_calls
def test_a_process_is_parked_when_all_its_threads_wait_for_each_other() -> None:
    job = subprocess.run([sys.executable, "-m", __name__], capture_output=True, text=True, check=True,
                         cwd=Path(__file__).parents[2], env=os.environ | {"OPENBLAS_NUM_THREADS": "1"})
    parked_at_once = {name: looks[0] for name, looks in json.loads(job.stdout).items()}
    assert parked_at_once == {
        "library": False, "library, in a graph": True, "handle": True, "event": True, "queue": True, "sleep": False,
        "event with a limit": False, "pipe": False,
        "process": False, "work": False, "event, and an idle thread": True, "event, and a thread that sleeps": False}
    assert all(looks[1] for looks in json.loads(job.stdout).values() if looks[0])


if __name__ == "__main__":
    json.dump(all_looks(), sys.stdout)
