"""The files of a timeline, what they say, and what becomes of one that cannot be written or read."""

import errno
import html
import itertools
import json
import logging
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import mpistrat
from mpistrat.api import job as job_of_init
from mpistrat.cli.main import main
from mpistrat.cli.timeline import longest_wait
from mpistrat.core.errors import SettingsError
from mpistrat.core.handle import Entry, Handle
from mpistrat.core.request import ScaledOp, Sum, allreduce_request, specs_of
from mpistrat.core.settings import Settings
from mpistrat.core.topology import Topology
from mpistrat.trace import last, records
from mpistrat.trace.analysis import Unfinished, analyse
from mpistrat.trace.clocks import Offset
from mpistrat.trace.records import NO_STEP, OperationRing, Record, Traced
from mpistrat.trace.timeline import Timeline, records_in
from mpistrat.trace.tracer import Tracer

MS = 1_000_000


def record(rank: int = 0, number: int = 0, submitted: int = 0, agreed: int = 10, ended: int = 12,
           **others: Any) -> Record:
    """A record whose times are milliseconds after the first second."""
    fields = {"process_set": 0, "ranks": 2, "backend": "shared_memory", "name": f"x{number}", "kind": "allreduce",
              "op": "sum", "dtype": "float32", "device": "cpu", "bucket": number, "nbytes": 2_000_000, "step": 0}
    times = {name: 1000 * MS + at * MS for name, at in (
        ("submitted", submitted), ("agreed", agreed), ("began", agreed), ("ended", ended), ("delivered", ended))}
    return Record(rank=rank, number=number, **{**fields, **times, **others})


# Rank 1 comes 10 ms late to the first operation and in time to the second one, which waits for its reduction.
JOB = [record(0, 0, submitted=0), record(1, 0, submitted=10), record(0, 1, submitted=12, agreed=14, ended=16, step=1),
       record(1, 1, submitted=13, agreed=14, ended=16, step=1)]


def written(path: Path, some: list[Record], mark_cycles: bool = False) -> Path:
    timeline = Timeline(str(path), ["a", "b"], mark_cycles)
    timeline.add(some)
    timeline.close()
    timeline.close()
    return path


def test_a_file_has_what_was_written(tmp_path: Path) -> None:
    path = written(tmp_path / "f.json", [*JOB, record(1, 2, submitted=0) ._replace(submitted=0, step=NO_STEP)])
    assert records_in(str(path)) == ([*JOB, record(1, 2)._replace(submitted=0, step=NO_STEP)], False)


def test_chromes_format_has_a_process_for_each_rank_and_horovods_phases(tmp_path: Path) -> None:
    events = json.loads(written(tmp_path / "f.json", JOB, mark_cycles=True).read_text())
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "rank 0 on a", 1: "rank 1 on b", 2: "the rank that came last"}
    of_rank_0 = [event["name"] for event in events if event["pid"] == 0 and event["ph"] == "X"]
    assert of_rank_0 == ["SHM_ALLREDUCE", "x0", "NEGOTIATE_ALLREDUCE", "SHM_ALLREDUCE",
                         "SHM_ALLREDUCE", "x1", "NEGOTIATE_ALLREDUCE", "SHM_ALLREDUCE"]
    assert [event["name"] for event in events if event["ph"] == "i" and event["pid"] == 0] == [
        "STEP 0", "CYCLE_START", "STEP 1", "CYCLE_START"]
    assert [(event["name"], event["args"]) for event in events if event.get("cat") == "last"] == [
        ("rank 1", {"operation": "x0", "late_us": 10_000}), ("rank 1", {"operation": "x1", "late_us": 1_000})]


def test_what_was_chosen_by_measuring_is_marked_once_at_the_operation_before(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    timeline = Timeline(str(path), ["a", "b"], mark_cycles=False)
    for each, sentences in zip(JOB, (["chunks of 4 MiB"], ["chunks of 4 MiB"], ["chunks of 512 KiB"]), strict=False):
        timeline.add([each])
        timeline.add_choices(sentences)
    timeline.close()
    marks = [(event["name"], event["ts"]) for event in json.loads(path.read_text()) if event["ph"] == "i"]
    first, third = [each for each in JOB if not each.rank][:2]
    assert [mark for mark in marks if mark[0].startswith("chunks")] == [
        ("chunks of 4 MiB", first.delivered / 1000), ("chunks of 512 KiB", third.delivered / 1000)]


def test_operations_that_overlap_are_in_lanes_of_their_own(tmp_path: Path) -> None:
    some = [record(0, 0, submitted=0), record(0, 1, submitted=5, bucket=0),
            record(0, 2, submitted=12, agreed=13, ended=14)]
    events = json.loads(written(tmp_path / "f.json", some).read_text())
    assert [event["tid"] for event in events if event.get("cat") == "operation"] == [1, 2, 1]


def test_a_file_can_be_read_wherever_it_is_cut(tmp_path: Path) -> None:
    data = written(tmp_path / "f.json", JOB).read_bytes()
    cut = tmp_path / "cut.json"
    counts = []
    for size in (*range(len(data) // 2, len(data) - 1, 7), len(data) - 1):
        cut.write_bytes(data[:size])
        found, is_cut = records_in(str(cut))
        assert found == JOB[:len(found)]
        counts.append(len(found))
        assert is_cut
    assert counts == sorted(counts) and counts[-1] == len(JOB)


def test_the_json_is_valid_after_each_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, pwrite, sizes = tmp_path / "f.json", os.pwrite, []

    def checked(file: int, data: bytes, offset: int) -> int:
        done = pwrite(file, data, offset)
        sizes.append(len(data))
        assert isinstance(json.loads(path.read_text()), list)
        return done

    monkeypatch.setattr(os, "pwrite", checked)
    written(path, [record(number=number) for number in range(100)])
    assert len(sizes) > 5 and max(sizes) < 5000


def test_a_disk_that_fills_up_leaves_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = Timeline(str(tmp_path / "f.json"), ["a", "b"], False)
    timeline.add(JOB[:2])
    pwrite, is_first = os.pwrite, itertools.chain([True], itertools.repeat(False))

    def full(file: int, data: bytes, offset: int) -> int:
        if next(is_first):
            pwrite(file, data[:10], offset)
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(file, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        timeline.add(JOB[2:])
    assert records_in(str(tmp_path / "f.json")) == (JOB[:2], False)


is_full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))


def test_a_disk_that_is_full_at_the_start_leaves_nothing_and_the_error_names_the_file(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", is_full)
    opened = set(os.listdir("/proc/self/fd"))
    path = tmp_path / "f.json"
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        Timeline(str(path), ["a", "b"], False)
    assert not path.exists() and set(os.listdir("/proc/self/fd")) == opened


def test_records_travel_in_small_messages() -> None:
    some = [record(number=number, name=f"layer {number % 7}", submitted=number) for number in range(200)]
    messages = records.to_messages(some)
    assert [each for message in messages for each in records.from_message(message)] == some
    assert len(messages) > 3 and max(map(len, messages)) <= 3000
    assert records.to_messages([]) == []


# -- what a timeline says ---------------------------------------------------------------------------------------------


def test_the_time_of_each_rank_adds_up() -> None:
    first, second = analyse(JOB).ranks
    assert (first.computing, first.waiting, first.agreeing, first.moving) == pytest.approx((0, 11 / 16, 1 / 16, 4 / 16))
    assert (second.computing, second.waiting, second.agreeing, second.moving) == pytest.approx(
        (11 / 16, 0, 1 / 16, 4 / 16))


def test_what_is_reduced_before_the_last_gradient_is_hidden() -> None:
    some = [record(0, 0, submitted=10, agreed=10, ended=20), record(0, 1, submitted=15, agreed=20, ended=30)]
    assert analyse(some).ranks[0].hidden == pytest.approx(0.25)
    assert analyse([each._replace(step=NO_STEP) for each in some]).ranks[0].hidden is None
    assert analyse([record(0, 0, submitted=0)]).ranks[0].hidden == 0


@pytest.mark.parametrize(("others", "reason"), [
    ([], "nothing else was ready"),
    ([record(number=1, dtype="float16")], "only collectives of another dtype than float32 were ready"),
    ([record(number=1)], "the fusion buffer was full"),
    ([record(number=1, op="max")], "only collectives of another kind, op or device were ready"),
    ([record(number=1, kind="allgather", op="")], "nothing else was ready"),
])
def test_why_an_operation_was_not_fused(others: list[Record], reason: str) -> None:
    found = analyse([record(number=0, name="mine"), *others]).unfused
    assert any(each.reason.startswith(reason) and "mine" in each.names for each in found)


def test_operations_of_one_bucket_are_fused_and_those_of_other_kinds_never_are() -> None:
    assert analyse([record(number=0), record(number=1, bucket=0)]).unfused == ()
    assert analyse([record(kind="allgather", op="")]).unfused[0].reason == "allgather is never fused"
    assert analyse([record(op="adasum")]).unfused[0].reason == "an adasum is never fused"


@pytest.mark.parametrize(("name", "is_own"), [
    ("check/tape/5", True), ("check/optimizer1/0", True), ("optimizer1/fit.heads", True),
    ("elastic.commit.heads", True), ("eval/optimizer2/weights/digest", True), ("optimizer1", False),
    ("optimizer1/sparse", False), ("checks", False), ("optimizer1/fitted", False)])
def test_what_mpistrat_checks_by_itself_is_not_among_them(name: str, is_own: bool) -> None:
    assert (analyse([record(kind="allgather", op="", name=name)]).unfused == ()) is is_own


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_names_the_straggler(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "f.json", JOB)
    assert main(["timeline", str(path)]) == 0
    out = capsys.readouterr().out
    assert "2 operations on 2 ranks in 0.016 s, 2 steps" in out
    assert "Rank 1 came last in 2 of 2 operations, 5.5 ms after the first (median): others waited 0.011 s" in out
    assert "MPISTRAT" not in out and "2  nothing else was ready: x0, x1" in out
    assert out.endswith("       2  SHM_ALLREDUCE: 4 MB at 1 GB/s, in operations of 2 MB\n")


def test_rates_are_compared_with_what_bench_has_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = tmp_path / "bench.json"
    bench.write_text(json.dumps([
        {"case": "1KB", "operation": "allreduce", "nbytes": 1024, "mpistrat_s": 1e-5},
        {"case": "1MB", "operation": "allreduce", "nbytes": 2**20, "mpistrat_s": 2**20 / 4e9},
        {"case": "gather", "operation": "allgather", "nbytes": 2_000_000, "mpistrat_s": 1e-5}]))
    path = written(tmp_path / "f.json", JOB)
    assert main(["timeline", str(path), "--bench", str(bench)]) == 0
    assert "in operations of 2 MB: 25.0 % of 4 GB/s, the rate of bench for 1MB\n" in capsys.readouterr().out
    bench.write_text('[{"case": 1}]')
    assert main(["timeline", str(path), "--bench", str(bench)]) == 2
    assert "is not a file of mpistrat bench --json: KeyError" in capsys.readouterr().err


def test_a_file_that_was_cut_is_read_and_has_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "f.json", JOB)
    path.write_bytes(path.read_bytes()[:-20])
    assert main(["timeline", str(path)]) == 2
    captured = capsys.readouterr()
    assert "Rank 1 came last" in captured.out
    assert f"the end of {path} is missing" in captured.err


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'[{"ph":"X","name":"other"}]', b"text", b"\x0a\xff", b"\x0a",
                                     b"\x0a\x02\xff\xff", b'[{"name":"x","cat":"operation","ts":1,"args":{}}]',
                                     b"null", b"5", b'{"traceEvents":null}', b'{"traceEvents":5}', b"[" * 100_000,
                                     b'[{"cat":"operation"}]', b'[{"name":"x","cat":"operation","ts":"1","args":{}}]',
                                     b'[{"name":"x","cat":"operation","ts":1e999,"args":{}}]',
                                     b'[{"name":"x","cat":"operation","ts":1,"args":null}]'],
                         ids=lambda content: content[:60].decode(errors="replace"))
def test_a_file_of_something_else_is_a_sentence_and_exit_code_2(content: bytes, tmp_path: Path,
                                                                capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "f.json"
    path.write_bytes(content)
    assert main(["timeline", str(path)]) == 2
    assert f"mpistrat timeline: {path} cannot be read as a timeline: " in capsys.readouterr().err


@pytest.mark.parametrize(("field", "value"), [("rank", "0"), ("agreed", "x"), ("nbytes", None), ("step", 1.5)])
def test_a_field_of_another_type_is_a_sentence_too(field: str, value: Any, tmp_path: Path,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "f.json", JOB)
    events = json.loads(path.read_text())
    for event in events:
        if field in event.get("args", ()):
            event["args"][field] = value
    path.write_text(json.dumps(events))
    assert main(["timeline", str(path)]) == 2
    assert "the timeline was written by another version of mpistrat: " in capsys.readouterr().err


@pytest.mark.parametrize("before", ["\n", "\n\n  ", '{"traceEvents":', '\n{\n"traceEvents":'])
def test_chromes_format_may_begin_with_an_empty_line_and_may_be_in_an_object(before: str, tmp_path: Path) -> None:
    path = written(tmp_path / "f.json", JOB)
    path.write_text(before + path.read_text() + "}" * before.count("{"))
    assert records_in(str(path)) == (JOB, False)


@pytest.mark.parametrize(("words", "text"), [
    (["none.json"], "No such file"), (["f.json", "--html", "."], "the page cannot be written")])
def test_a_path_that_cannot_be_read_or_written_is_a_sentence(
        words: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "f.json", JOB)
    assert main(["timeline", *words]) == 2
    assert text in capsys.readouterr().err


def test_the_page_needs_nothing_else_and_a_browser_shows_its_charts(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    name = "<b>&\"gradient\""
    assert main(["timeline", str(written(tmp_path / "f.json", [each._replace(name=name) for each in JOB])), "--html",
                 str(page)]) == 0
    text = page.read_text()
    assert "<script" not in text and "http" not in text and name not in text
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no Chromium")
    shown = subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/user",
                            "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=60, check=True).stdout
    assert shown.count("<svg") == 3 and shown.count("<circle") == 2
    assert "rank 1, computing: 68.8 %" in shown


def test_the_page_has_scales_and_says_who_waited_longest_and_where_the_late_rank_was(tmp_path: Path) -> None:
    longest = longest_wait(JOB)
    late = max((each for each in JOB if each.number == longest.number), key=lambda each: each.submitted).rank
    place = 'at "train.py", line 9, in slow: time.sleep(0.05)'
    timeline = Timeline(str(tmp_path / "f.json"), ["node1"] * 2, mark_cycles=False)
    timeline.add_places({0: "elsewhere", late: place}, longest.submitted)
    timeline.add(JOB)
    timeline.close()
    page = tmp_path / "page.html"
    assert main(["timeline", str(tmp_path / "f.json"), "--html", str(page)]) == 0
    text = html.unescape(page.read_text())
    assert re.search(rf"Rank {longest.rank} waited \S+ ms for rank {late}.*, for {longest.name}\. "
                     rf"Rank {late} was {re.escape(place)}", text)
    assert re.search(r">20 %<.*>100 %<", text) and len(re.findall(r">[\d.e-]+ m?s<", text)) >= 4
    assert 'class="in">68.8 %<' in text


# -- who writes it ----------------------------------------------------------------------------------------------------


NO_STATUS = {"XDG_RUNTIME_DIR": "/nonexistent"}


class Job:
    """The tracers of two ranks, whose messages travel at once, and what rank 0 warns of."""

    def __init__(self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("mpistrat.trace.tracer._TIMELINE_INTERVAL_S", 0.01)
        monkeypatch.setattr("mpistrat.trace.tracer._INTERVAL_S", 0.05)
        self._caplog = caplog
        self.told: list[list[list[str]]] = [[], []]
        self.tracers = [Tracer(Topology(rank, ("here", "there")), {1: Offset(0, 0, is_shared=True)}, NO_STATUS,
                               tell=self.told[rank].append) for rank in range(2)]
        self._carrying = threading.RLock()
        self.rings = [OperationRing(1000) for _ in range(2)]
        self.carries = threading.Event()
        self.carries.set()
        self.in_flight: list[list[Entry]] = [[], []]
        for rank in range(2):
            self.tracers[rank].start(lambda rank=rank: {0: Traced(self.rings[rank], 2, "mpi",
                                                                  lambda: self.in_flight[rank])}, self._carry)

    def _carry(self) -> None:
        with self._carrying:
            for sender, receiver in ((0, 1), (1, 0)):
                while self.carries.is_set() and self.tracers[sender].outgoing:
                    self.tracers[receiver].receive(self.tracers[sender].outgoing.popleft())

    def work(self, steps: int) -> None:
        request = allreduce_request("g", specs_of([np.ones(2)]), ScaledOp(Sum), labels=("w",))
        for ring in self.rings:
            for number in range(steps):
                now = time.monotonic_ns()
                ring.add(Entry(request, [np.ones(2)], Handle("g"), submitted=now, agreed=now, number=number), number,
                         now, now)

    @property
    def warnings(self) -> list[str]:
        return [each.getMessage() for each in self._caplog.records if each.levelno == logging.WARNING]

    def end(self) -> None:
        for tracer in reversed(self.tracers):
            tracer.stop()
        self._carry()
        for tracer in self.tracers:
            tracer.close()


@pytest.fixture
def job(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Job(caplog, monkeypatch)
    yield made
    made.end()


def steps_in(path: Path) -> list[tuple[int, int]]:
    return sorted((each.rank, each.step) for each in records_in(str(path))[0])


def until(holds: Callable[[], bool]) -> None:
    limit = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_a_timeline_has_all_ranks_from_its_start_to_its_stop(job: Job, tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    job.work(2)
    time.sleep(0.01)
    job.tracers[1].start_timeline("rank 0 decides", False)
    job.tracers[0].start_timeline(str(path), False)
    job.work(3)
    for tracer in reversed(job.tracers):
        tracer.stop_timeline()
    job.work(1)
    assert steps_in(path) == [(rank, step) for rank in range(2) for step in (2, 3, 4)]
    assert job.warnings == []
    job.tracers[0].stop_timeline()
    job.tracers[0].start_timeline(str(path), False)
    job.work(1)
    job.end()
    assert steps_in(path) == [(rank, 6) for rank in range(2)]


def test_times_are_on_the_clock_of_rank_0(tmp_path: Path) -> None:
    tracer = Tracer(Topology(0, ("", "")), {1: Offset(5 * MS, time.monotonic_ns(), is_shared=False)}, NO_STATUS)
    tracer.start_timeline(str(tmp_path / "f.json"), False)
    message, = records.to_messages([record(1, submitted=7)])
    tracer.receive(b"R" + message)
    tracer.close()
    found, = records_in(str(tmp_path / "f.json"))[0]
    assert found == record(1, submitted=2, agreed=5, ended=7)


def test_a_window_is_complete_before_the_job_ends(job: Job, tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    job.tracers[0].start_timeline(str(path), False, (2, 4))
    job.work(10)
    until(lambda: not job.tracers[0]._recording.has_file)
    assert steps_in(path) == [(0, 2), (0, 3), (1, 2), (1, 3)]
    assert job.warnings == []


def test_a_window_that_never_comes_is_a_warning(job: Job, tmp_path: Path) -> None:
    job.tracers[0].start_timeline(str(tmp_path / "f.json"), False, (20, 40))
    job.work(3)
    job.end()
    warning, = job.warnings
    assert "it is empty, because steps 20 to 39 were not executed: the job had 3 steps" in warning


def test_a_second_start_is_a_warning(job: Job, tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        job.tracers[0].start_timeline(str(tmp_path / name), False)
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    warning, = job.warnings
    assert "a.json is still being written. Call stop_timeline() first" in warning


def test_a_path_that_cannot_be_written_is_a_warning(job: Job, tmp_path: Path) -> None:
    job.tracers[0].start_timeline(str(tmp_path / "none" / "f.json"), False)
    job.work(1)
    job.tracers[0].stop_timeline()
    warning, = job.warnings
    assert warning.startswith("mpistrat: the timeline cannot be created: ") and "none/f.json" in warning


@pytest.mark.parametrize("failing", [["add"], ["close"], ["add", "close"]], ids="+".join)
def test_a_file_that_cannot_be_written_or_closed_is_one_warning(
        job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: list[str]) -> None:
    for name in failing:  # To close fails on NFS.
        monkeypatch.setattr(Timeline, name, Mock(side_effect=OSError(errno.EDQUOT, "Disk quota exceeded")))
    job.tracers[0].start_timeline(str(tmp_path / "f.json"), False)
    job.work(3)
    until(lambda: bool(job.warnings) or "add" not in failing)
    job.tracers[0].stop_timeline()
    job.end()
    warning, = job.warnings
    assert "cannot be written: [Errno 122] Disk quota exceeded" in warning


def test_a_rank_that_does_not_answer_is_named(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpistrat.trace.tracer._LAST_RECORDS_S", 0.05)
    job.carries.clear()
    job.tracers[0].start_timeline(str(tmp_path / "f.json"), False)
    job.tracers[0].stop_timeline()
    warning, = job.warnings
    assert "ranks [1] did not send their last operations within 0.05 s" in warning


def test_what_was_too_fast_to_be_read_is_counted(job: Job, tmp_path: Path) -> None:
    job.tracers[0].start_timeline(str(tmp_path / "f.json"), False)
    with job.tracers[0]._lock:
        job.rings[0]._serial += 1500
        job.work(1)
    job.tracers[0].stop_timeline()
    warning, = job.warnings
    assert "1500 operations are missing, because they came faster than they could be recorded" in warning


def test_a_second_part_of_a_job_has_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mpistrat.shutdown()
    monkeypatch.setattr(job_of_init, "_timelines", itertools.count())
    monkeypatch.setenv("MPISTRAT_TIMELINE", str(tmp_path / "f.json"))
    for size in (2, 3):
        mpistrat.init()
        mpistrat.allreduce(np.ones(size))
        mpistrat.shutdown()
    found = {path.name: records_in(str(path))[0][0].nbytes for path in tmp_path.iterdir()}
    assert found == {"f.json": 16, "f.1.json": 24}


def test_messages_that_cannot_be_sent_do_not_pile_up(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpistrat.trace.tracer._MOST_WAITING", 3)
    job.tracers[0].start_timeline(str(tmp_path / "f.json"), False)
    job.carries.clear()
    for _ in range(20):
        before = job.tracers[1].reader.operations
        job.work(1)
        until(lambda before=before: job.tracers[1].reader.operations > before)  # type: ignore[misc]
    assert sum(message.startswith(b"R") for message in job.tracers[1].outgoing) <= 4
    job.carries.set()
    job.tracers[0].stop_timeline()
    warning, = job.warnings
    assert "operations are missing, because they came faster than they could be recorded" in warning


@pytest.mark.parametrize(("variables", "warning"), [
    *(({"TIMELINE": timeline, f"TIMELINE_{setting}": value}, f"MPISTRAT_TIMELINE_{setting}={value} has no effect, "
       "because MPISTRAT_TIMELINE names no file.") for timeline in ("none", "DYNAMIC")
      for setting, value in (("STEPS", "1:3"), ("MARK_CYCLES", "1"))),
    ({"TIMELINE": "f.json", "RECORDER": "0"}, "there is no timeline, because MPISTRAT_RECORDER=0.")])
def test_settings_that_keep_a_timeline_from_being_written_are_a_warning(
        variables: dict[str, str], warning: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture) -> None:
    mpistrat.shutdown()
    monkeypatch.chdir(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(f"MPISTRAT_{name}", value)
    mpistrat.init()
    mpistrat.shutdown()
    assert caplog.messages == [f"mpistrat: {warning}"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("text", "window"), [("100:120", (100, 120)), ("all", None), ("5:5", None), ("a:b", None)])
def test_a_window_is_two_numbers(text: str, window: tuple[int, int] | None) -> None:
    assert Settings(timeline_steps=text).timeline_window == window
    if window is None and text != "all":
        with pytest.raises(SettingsError, match=f"MPISTRAT_TIMELINE_STEPS='{text}': expected all, or FIRST:END"):
            Settings.from_env({"MPISTRAT_TIMELINE_STEPS": text})


# -- when a rank fails ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [0, 1])
def test_when_a_rank_fails_all_ranks_tell_their_last_operations_once(job: Job, failing: int) -> None:
    job.work(3)
    request = allreduce_request("late", specs_of([np.ones(2)]), ScaledOp(Sum))
    job.in_flight[0] = [Entry(request, [np.ones(2)], Handle("late"), submitted=time.monotonic_ns())]
    assert job.tracers[failing].fail_all(20.0)
    until(lambda: all(job.told))
    job.tracers[failing].fail()
    job.end()
    told = [last.from_lines(lines) for (lines,) in job.told]
    assert [(each.rank, each.size, each.host) for each in told] == [(0, 2, "here"), (1, 2, "there")]
    assert [[each.step for each in rank.records if each.is_complete] for rank in told] == [[0, 1, 2], [0, 1, 2]]
    late, = analyse([record for rank in told for record in rank.records]).unfinished
    assert (late.name, late.waiting, late.missing, late.absent) == ("late", (0,), (1,), 0)


def test_rank_0_knows_at_the_end_what_all_ranks_have_done(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpistrat.trace.reports._LEAST_S", 0.0)
    monkeypatch.setattr("mpistrat.trace.reports._LEAST_OPERATIONS", 1)
    job.work(2)
    until(lambda: all(tracer.reader.operations == 2 and tracer.reports._totals[rank]._before for rank, tracer in
                      enumerate(job.tracers)))
    job.work(3)
    job.end()
    assert [(each.steps, each.operations) for each in job.tracers[0].reports._totals.values()] == [(3, 3), (3, 3)]
    assert re.fullmatch(r"mpistrat: 2 ranks have done \S+ steps per second; collectives took .*\.", job.tracers[0].line)
    job.tracers[0].is_line_due = False
    assert job.tracers[0].line == ""


def test_without_a_reader_nothing_is_told() -> None:
    tracer = Tracer(Topology(0, ("", "")), {}, NO_STATUS)
    tracer.start(dict, lambda: None)
    tracer.fail()
    assert not tracer.fail_all(0.0)
    tracer.stop()
    assert not tracer.outgoing


def test_a_rank_tells_its_last_operations_after_it_has_stopped(job: Job) -> None:
    job.work(2)
    job.tracers[1].stop()
    job.tracers[1].fail()
    job.tracers[1].tell_last()
    (lines,) = job.told[1]
    assert len(last.from_lines(lines).records) == 2


def test_a_rank_that_waits_for_one_that_never_comes_waits_until_the_end() -> None:
    some = [record(0, -5, 10, 90, 90), record(0, 1), record(1, 1)]
    found = analyse(some)
    assert found.operations == 1
    assert found.ranks[0].waiting == pytest.approx(78 / 90)
    assert found.unfinished == (Unfinished("x-5", (0,), (1,), 0, 0.08),)


def told(rank: int, some: list[Record], offsets: dict[int, int] | None = None) -> list[str]:
    return last.LastOperations(rank, 3, f"node{rank}", offsets or {}, some).lines()


def test_what_ranks_tell_is_one_file_on_the_clock_of_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    many = [record(2, number, submitted=number) for number in range(500)]
    ranks = [told(2, many, {2: 9 * MS}), told(0, [record(0, 1)], {2: 5 * MS}), ["cut", *told(1, [record(1, 1)])]]
    assert all(len(line) < 3900 for lines in ranks for line in lines)
    sentence = last.save(ranks)
    path, = tmp_path.glob(".mpistrat/*.json")
    assert sentence == f"the last operations of ranks [0, 2] are shown by: mpistrat timeline .mpistrat/{path.name}"
    assert (tmp_path / ".mpistrat" / ".gitignore").read_text() == "*\n"
    found = records_in(str(path))[0]
    assert len(found) == 501
    assert min(each.submitted for each in found if each.rank == 2 and each.submitted) == (
        min(each.submitted for each in many if each.submitted) - 5 * MS)


@pytest.mark.parametrize("changed", [lambda lines: [lines[0], "bm8="], lambda lines: [lines[1], lines[0]],
                                     lambda lines: lines[1:], lambda lines: [lines[0], lines[1][:-8]], lambda _: []])
def test_lines_that_were_mixed_or_cut_are_a_value_error(changed: Callable[[list[str]], list[str]]) -> None:
    with pytest.raises(ValueError, match=r"."):
        last.from_lines(changed(told(1, [record(1, 1)])))


def test_ranks_that_did_nothing_leave_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert last.save([told(0, []), ["cut"], []]) == last.save([]) == ""
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "pwrite", is_full)
    assert " cannot be written: [Errno 28] No space left on device: '.mpistrat/" in last.save([told(1, [record(1, 1)])])
    assert list(tmp_path.glob(".mpistrat/*.json")) == []


def test_the_newest_files_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".mpistrat").mkdir(0o755)
    for age in range(20):
        path = tmp_path / ".mpistrat" / f"{(age + 5) % 20}.json"
        path.touch()
        os.utime(path, (1000 - age, 1000 - age))
    written = last.save([told(1, [record(1, 1)])]).rpartition("/")[2]
    assert {path.name for path in tmp_path.glob(".mpistrat/*.json")} == {written, *(f"{n}.json" for n in range(5, 14))}


def without_its_working_directory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path / "gone").mkdir()
    monkeypatch.chdir(path / "gone")
    (path / "gone").rmdir()


def read_only(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a read-only mount unlink fails in this way also if there is no file.
    for owner, name in (os, "open"), (os, "unlink"), (Path, "unlink"):
        monkeypatch.setattr(owner, name, Mock(side_effect=OSError(errno.EROFS, "Read-only file system")))


def where_others_may_write(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path / ".mpistrat").mkdir()
    (path / ".mpistrat").chmod(0o777)


@pytest.mark.parametrize("prepare", [
    without_its_working_directory, read_only, where_others_may_write,
    lambda path, monkeypatch: monkeypatch.chdir("/proc/self"), lambda path, _: (path / ".mpistrat").touch(),
    lambda path, _: (path / ".mpistrat").symlink_to(path)], ids=["gone", "read-only", "open", "/proc", "file", "link"])
def test_a_directory_that_cannot_be_written_is_a_sentence(
        prepare: Callable[[Path, pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.chdir(tmp_path)
        prepare(tmp_path, patched)
        sentence = last.save([told(1, [record(1, 1)])])
    assert sentence.startswith("the last operations of ranks [1] cannot be written: ")
    assert "\n" not in sentence
    assert not list(tmp_path.rglob("*.json"))
