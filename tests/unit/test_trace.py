"""What is recorded of operations, and what each rank reports of it once a second."""

import json
import os
import platform
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from mpistrat.core.handle import Entry, Handle
from mpistrat.core.interfaces import DeviceExecutor, Observer
from mpistrat.core.request import Request, ScaledOp, Sum, allgather_request, allreduce_request, specs_of
from mpistrat.core.settings import Settings
from mpistrat.core.slowest import Waits
from mpistrat.core.topology import Topology
from mpistrat.engine.controller import Controller
from mpistrat.engine.executor import Executor
from mpistrat.trace import reports
from mpistrat.trace.clocks import Offset
from mpistrat.trace.records import NO_STEP, Operation, OperationRing, Record, StepCounter, length, union
from mpistrat.trace.reports import Totals, line_of
from tests.support.thread_group import ThreadGroup


def entry(name: str, array: np.ndarray, kind: str = "allreduce") -> Entry:
    specs = specs_of([array])
    request = allgather_request(name, specs) if kind == "allgather" else allreduce_request(name, specs, ScaledOp(Sum))
    return Entry(request, [array], Handle(name), submitted=time.monotonic_ns())


def record(number: int = 0, submitted: int = 0, agreed: int = 0, delivered: int = 0, rank: int = 0,
           **others: Any) -> Record:
    fields = {"process_set": 0, "ranks": 2, "backend": "shared_memory", "name": f"x{number}", "kind": "allreduce",
              "op": "sum", "dtype": "float32", "device": "cpu", "number": number, "bucket": number, "nbytes": 1000,
              "step": 0, "began": agreed, "ended": delivered}
    return Record(rank=rank, submitted=submitted, agreed=agreed, delivered=delivered, **{**fields, **others})


def gradient(name: str) -> Request:
    return allreduce_request(name, specs_of([np.ones(2)]), ScaledOp(Sum), labels=("dense/kernel",))


def operation(name: str, submitted: int, delivered: int, agreed: int = 0) -> Operation:
    request = gradient(name) if name != "metric" else entry(name, np.ones(1)).request
    agreed = agreed or submitted
    return Operation(0, 0, 0, request, 8, submitted, agreed, agreed, delivered, delivered)


@pytest.fixture
def lone() -> tuple[Executor, OperationRing]:
    """The executor of a job of one rank, and what it records."""
    ring = OperationRing(4)
    return Executor(ThreadGroup(1).data(0), Topology(0, ("",)), 1000, DeviceExecutor(), ring), ring


def test_an_operation_is_recorded_with_its_times_in_order(lone: tuple[Executor, OperationRing]) -> None:
    executor, ring = lone
    executor.execute([entry("x", np.ones(3, np.float32))])
    recorded, = ring.since(0)
    assert recorded.request.name == "x"
    assert (recorded.number, recorded.bucket, recorded.nbytes) == (0, 0, 12)
    times = recorded[5:]
    assert sorted(times) == list(times) and times[0] > 0


def test_operations_of_one_reduction_have_its_bucket(lone: tuple[Executor, OperationRing]) -> None:
    executor, ring = lone
    executor.execute([entry("a", np.ones(3)), entry("b", np.ones(3, np.float32)), entry("c", np.ones(3)),
                      entry("d", np.ones(3), "allgather")])
    assert {each.request.name: each.bucket for each in ring.since(0)} == {"a": 0, "b": 1, "c": 0, "d": 3}
    a, c = (each for each in ring.since(0) if each.bucket == 0)
    assert (a.began, a.ended) == (c.began, c.ended)


def test_an_operation_of_two_reductions_has_the_time_of_both(lone: tuple[Executor, OperationRing]) -> None:
    executor, ring = lone
    arrays = [np.ones(2), np.ones(2, np.float32)]
    both = Entry(allreduce_request("both", specs_of(arrays), ScaledOp(Sum)), arrays, Handle("both"))
    executor.execute([entry("first", np.ones(2)), both])
    first, second = ring.since(0)
    assert second.bucket == first.bucket == 0
    assert second.began == first.began and second.ended > first.ended


def test_what_was_prepared_for_a_vote_is_recorded_too(lone: tuple[Executor, OperationRing]) -> None:
    executor, ring = lone
    prepared = entry("x", np.ones(3))
    executor.prepare(prepared)
    executor.execute([prepared])
    assert [each.request.name for each in ring.since(0)] == ["x"]


def test_the_ring_keeps_the_last_ones_and_says_where_they_begin() -> None:
    ring = OperationRing(3)
    for name in "abcde":
        ring.add(entry(name, np.ones(1)), 0, 0, 0)
    assert [(each.serial, each.request.name) for each in ring.since(0)] == [(2, "c"), (3, "d"), (4, "e")]
    assert [each.serial for each in ring.since(4)] == [4]
    assert ring.since(5) == []


def test_a_ring_of_none_records_nothing() -> None:
    ring = OperationRing(0)
    ring.add(entry("x", np.ones(1)), 0, 0, 0)
    assert ring.since(0) == []


def test_spans_are_joined_and_cut() -> None:
    assert union([(5, 9), (0, 2), (1, 3), (9, 9)]) == [(0, 3), (5, 9)]
    assert union([(0, 3), (5, 9)], within=(2, 6)) == [(2, 3), (5, 6)]
    assert length([(0, 3), (5, 9)]) == 7


def test_the_shares_of_a_second_add_up() -> None:
    done = [operation("g/0", 10, 40, agreed=30), operation("metric", 35, 60, agreed=50)]
    waits = entry("later", np.ones(1))
    waits.submitted = 90
    assert reports.waits(done, [waits], (0, 100)) == pytest.approx((1e-7, 4e-8, 2e-8, 0))
    assert reports.waits([], [], (0, 100)) == pytest.approx((1e-7, 0, 0, 0))


def test_gradients_are_hidden_until_the_last_ones_of_their_step_are_submitted() -> None:
    first = [operation("g/0", 10, 20), operation("g/1", 15, 50), operation("g/2", 40, 60)]
    second = [operation("metric", 60, 70), operation("g/0", 80, 95), operation("g/1", 90, 98)]
    assert reports.waits(first, (), (0, 100)).hidden == pytest.approx(30e-9)  # 10 to 40
    assert reports.waits([*first, *second], (), (0, 100)).hidden == pytest.approx(40e-9)  # and 80 to 90
    assert reports.waits(first, (), (0, 20)).hidden == pytest.approx(10e-9)
    later = Entry(gradient("g/3"), [np.ones(1)], Handle("g/3"), submitted=70)  # It is not complete.
    assert reports.waits(first, [later], (0, 100)).hidden == pytest.approx(50e-9)  # 10 to 60


def test_a_rank_in_join_does_not_wait() -> None:
    assert reports.waits([operation("g", 0, 60, agreed=50)], [], (0, 100)) == pytest.approx((1e-7, 0, 1e-8, 0))


def test_the_oldest_operations_are_listed_first() -> None:
    old, new = entry("old" * 100, np.ones(1)), entry("new", np.ones(1))
    old.submitted, new.submitted = 10**9, 2 * 10**9
    assert reports.outstanding([new, old], 3 * 10**9) == [{"name": "old" * 40, "since_s": 2.0},
                                                        {"name": "new", "since_s": 1.0}]


def test_a_step_ends_when_a_gradient_comes_again() -> None:
    counter = StepCounter()
    plain = allreduce_request("metric", specs_of([np.ones(1)]), ScaledOp(Sum))
    assert [counter.add(each) for each in [plain, gradient("a"), gradient("b"), plain, gradient("a"), gradient("b"),
                                           gradient("b")]] == [NO_STEP, 0, 0, 0, 1, 1, 2]
    assert counter.steps == 3


def test_an_offset_is_that_of_the_shortest_message() -> None:
    offset = Offset(1000, now=0, is_shared=False)
    # One way took 100 and the other one 700, and then both 10.
    offset.add(sent=5_000_000_000, received=5_000_001_300, answered=5_000_001_400, returned=5_000_000_900)
    offset.add(sent=6_000_000_000, received=6_000_001_210, answered=6_000_001_310, returned=6_000_000_120)
    assert offset.at(6_000_000_200) == 1200


def test_an_offset_may_be_measured_while_it_is_read() -> None:
    offset = Offset(1000, now=0, is_shared=False)

    class Now(int):
        def __sub__(self, other: int) -> int:
            offset.add(sent=0, received=2000, answered=2000, returned=100)
            return int(self) - other

    assert offset.at(Now(100)) == 1000


def test_a_clock_that_is_shared_has_no_offset() -> None:
    offset = Offset(0, now=0, is_shared=True)
    offset.add(sent=0, received=500, answered=500, returned=600)
    assert offset.at(600) == 0


def test_a_status_file_is_replaced_whole_and_only_its_user_may_read_it(tmp_path: Path) -> None:
    file = reports.StatusFile(2, {"XDG_RUNTIME_DIR": str(tmp_path), "PMIX_NAMESPACE": "job 7"})
    file.write([{"rank": 0}])
    assert file.path.parent.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in file.path.parent.iterdir()] == [file.path.name]
    found = json.loads(file.path.read_text())
    assert (found["version"], found["job"], found["size"], found["ranks"]) == (1, "job 7", 2, [{"rank": 0}])
    assert 0 < found["started"] <= found["written"] <= time.time()
    file.remove()
    file.remove()
    assert not file.path.exists()


def test_a_status_file_that_cannot_be_removed_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = reports.StatusFile(1, {"XDG_RUNTIME_DIR": str(tmp_path)})
    file.write([])
    monkeypatch.setattr(Path, "unlink", Mock(side_effect=OSError(30, "Read-only file system")))
    file.remove()
    assert file.path.exists()


def test_files_of_jobs_that_were_killed_are_removed(tmp_path: Path) -> None:
    directory = reports.status_directory({"XDG_RUNTIME_DIR": str(tmp_path)})
    directory.mkdir(mode=0o700)
    alive, dead, elsewhere = [directory / name for name in (
        f"{platform.node()}-{os.getppid()}.json", f"{platform.node()}-99999999.json", "other-99999999.json")]
    for path in (alive, dead, elsewhere):
        path.touch()
    reports.StatusFile(1, {"XDG_RUNTIME_DIR": str(tmp_path)})
    assert alive.exists() and elsewhere.exists() and not dead.exists()


def test_a_directory_that_others_may_read_is_refused(tmp_path: Path) -> None:
    directory = reports.status_directory({"XDG_RUNTIME_DIR": str(tmp_path)})
    directory.mkdir(mode=0o755)
    with pytest.raises(PermissionError, match=r"mpistrat-\d+ gives access to other users \(mode 755\)"):
        reports.StatusFile(1, {"XDG_RUNTIME_DIR": str(tmp_path)})


class Rank:
    """A controller of one of three ranks, whose messages a ThreadGroup carries, and what it has received."""

    def __init__(self, group: ThreadGroup, rank: int):
        self.link = Observer()
        self.received: list[bytes] = []
        self.link.receive = self.received.append  # type: ignore[method-assign]
        topology = Topology(rank, ("",) * 3)
        executor = Executor(group.data(rank), topology, 0, DeviceExecutor(), OperationRing(0, self.link))
        self.controller = Controller(topology, group.control(rank), executor, Settings())


def test_messages_of_the_trace_go_from_rank_0_to_all_and_from_the_others_to_rank_0() -> None:
    ranks = [Rank(group := ThreadGroup(3, timeout_s=0.01), 0), Rank(group, 1), Rank(group, 2)]
    ranks[0].link.outgoing.append(b"down")
    ranks[2].link.outgoing.append(b"up")
    for _ in range(2):
        for rank in ranks:
            assert not rank.controller.run_cycle()  # Not news, which would reset the clock of a deadlock.
    assert [rank.received for rank in ranks] == [[b"up"], [b"down"], [b"down"]]


def test_totals_have_the_intervals_with_collectives_but_the_first() -> None:
    totals = Totals()
    for waits, steps, operations in ((Waits(1.0), 0, 0), (Waits(1.0, 0.9, 0.1), 3, 30), (Waits(1.0, 0.2, 0.1), 5, 50),
                                     (Waits(9.0), 5, 50), (Waits(0.5, 0.2, 0.1, 0.1), 8, 80)):
        totals.add(waits, steps, operations)
    assert totals == Totals(pytest.approx((1.5, 0.4, 0.2, 0.1)), 5, 50)


@pytest.mark.parametrize(("first", "second", "line"), [
    (Totals(Waits(10.0, 6.0, 1.0, 1.5), 50, 100), Totals(Waits(10.0, 0.0, 1.0, 0.5), 50, 100), "2 ranks have done 5 "
     "steps per second; collectives took 40% of the time on average (25% of it during the backward pass); the slowest "
     "was rank 1 on b, for which the others waited 60% of their time."),
    (Totals(Waits(10.0, 1.0, 1.0), 0, 2000), Totals(Waits(10.0, 1.0, 1.0), 0, 2000), "2 ranks have done 200 "
     "collectives per second; collectives took 20% of the time on average, and no rank was slower than the others."),
    (Totals(Waits(4.9), 9, 99), Totals(Waits(10.0), 9, 99), ""),
    (Totals(Waits(10.0), 9, 19), Totals(Waits(10.0), 9, 99), "")])
def test_the_line_of_a_job_says_its_speed_unless_it_was_short(first: Totals, second: Totals, line: str) -> None:
    assert line_of({1: second, 0: first}, ["a", "b"]) == (line and f"mpistrat: {line}")


def test_a_job_of_one_rank_has_no_line() -> None:
    assert line_of({0: Totals(Waits(10.0), 9, 99)}, ["a"]) == ""
