"""`mpistrat top`: status files that are good, foreign, old or cut; what is said of a job; what is printed."""

import copy
import json
import os
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpistrat.cli import top
from mpistrat.cli.main import main
from mpistrat.cli.top import Found, Stall, parse, read, summarize
from mpistrat.core.errors import LaunchError
from mpistrat.core.install import pip_extra
from mpistrat.trace.reports import status_directory

NOW = 1000.0


def rank(number: int, **changes: Any) -> dict[str, Any]:
    return {"rank": number, "host": f"node{number // 2 + 1}", "pid": os.getpid(), "steps": 100, "rows": 3200,
            "operations": 400, "bytes": 10_000, "computing": 0.8, "waiting": 0.15, "moving": 0.05,
            "hidden": 0.0, "rss_bytes": 1 << 30, "cores": 0.9, "delayed": 0.0, "place": "", "outstanding": [],
            "written": NOW, **changes}


def content(*ranks: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"version": 1, "job": "digits-17", "started": NOW - 90, "written": NOW, "size": len(ranks),
            "script": "train.py", "ranks": list(ranks), **changes}


def later(job: dict[str, Any], seconds: float, steps: int) -> dict[str, Any]:
    """The same job, after so many more steps of 32 rows."""
    job = copy.deepcopy(job)
    for each in [job, *job["ranks"]]:
        each["written"] += seconds
    for each in job["ranks"]:
        each["steps"] += steps
        each["rows"] += 32 * steps
    return job


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    made = status_directory(os.environ)
    made.mkdir(mode=0o700)
    return made


def put(directory: Path, text: str | dict[str, Any], name: str = "job.json") -> Path:
    path = directory / name
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    return path


def test_a_good_file_is_read(directory: Path) -> None:
    put(directory, content(rank(1, outstanding=[{"name": "g", "since_s": 2}]), rank(0), more_of_a_later_version=1))
    found = read(directory, os.getuid(), NOW)
    assert not found.problems
    job, = found.jobs
    assert [each.rank for each in job.ranks] == [0, 1]
    assert job.ranks[1].outstanding[0].name == "g"


def test_no_directory_is_no_job(tmp_path: Path) -> None:
    assert read(tmp_path / "none", os.getuid(), NOW) == Found(())


@pytest.mark.parametrize("text, why", [
    (json.dumps(content(rank(0)))[:-30], "is truncated, or is not JSON"), ("", "is truncated, or is not JSON"),
    ("[]", "version None"),
    (content(rank(0), version=2), "has version 2, but this mpistrat reads version 1. Remove the file if its job has"),
    (content({"rank": 0}), "is incomplete: 'outstanding'"), (content(rank(0), ranks=None), "is incomplete"),
    (content({"rank": 0, "outstanding": []}), "is incomplete: 'host'. Another version of mpistrat has written the "
     "file. Remove it if its job has ended"),
    (content(rank(0, pid=2**31 - 1), written=NOW - 60), "was written 60 s ago, and the first rank"),
    (content(rank(0, pid=os.getpid()), written=NOW - 10**6), "was written 1000000 s ago, and the first rank has ended"),
    (content(written=NOW - 60), "was written 60 s ago"),
], ids=["cut", "empty", "a list", "a later version", "half a rank", "no ranks", "an earlier build",
        "an ended job", "its pid has another process", "a silent job"])
def test_a_file_that_is_of_no_use_is_named_with_the_reason(directory: Path, text: Any, why: str) -> None:
    path = put(directory, text)
    put(directory, content(rank(0)), "good.json")
    found = read(directory, os.getuid(), NOW)
    assert len(found.jobs) == 1
    problem, = found.problems
    assert problem.startswith(f"{path}: ")
    assert why in problem


def test_foreign_files_and_directories_are_not_read(directory: Path) -> None:
    path = put(directory, content(rank(0)))
    path.chmod(0o666)
    assert "gives access to other users (mode 666)" in read(directory, os.getuid(), NOW).problems[0]
    path.unlink()
    path.symlink_to("/etc/hostname")
    assert read(directory, os.getuid(), NOW).problems
    assert f"belongs to user {os.getuid()}" in read(directory, os.getuid() + 1, NOW).problems[0]
    directory.chmod(0o755)
    assert "its files are not read" in read(directory, os.getuid(), NOW).problems[0]


# -- summaries --------------------------------------------------------------------------------------------------------


def test_speed_is_that_of_all_ranks_between_two_readings() -> None:
    first = content(rank(0), rank(1))
    summary = summarize(parse(later(first, 2.0, 10)), parse(first), NOW + 2)
    assert (summary.steps_per_s, summary.rows_per_s) == (5.0, 320.0)
    assert summary.communication == pytest.approx(0.2)
    assert summary.age_s == 92.0
    assert summarize(parse(first), None, NOW).steps_per_s is None
    assert summarize(parse(first), parse(first), NOW).steps_per_s is None  # It was not written anew.


def test_what_nothing_counts_is_not_known() -> None:
    first = content(rank(0, steps=None, rows=None), rank(1, rows=None))
    now = copy.deepcopy(first)
    now["ranks"][0]["written"] = now["ranks"][1]["written"] = NOW + 1
    summary = summarize(parse(now), parse(first), NOW)
    assert summary.rows_per_s is None
    assert summary.steps_per_s == 0.0


@pytest.mark.parametrize("waiting, slowest, why", [
    ((0.4, 0.02, 0.38, 0.4), 1, "the others wait 39% of the time, and this rank 2%. It computes: it has used 0.9 "),
    ((0.1, 0.11, 0.1, 0.12), None, "each rank waits 11% of the time"),
    ((0.0, 0.01), None, "no rank waits for another"),
    ((0.4,), None, "the job has only one rank"),
])
def test_the_slowest_rank_is_the_one_that_waits_least(waiting: tuple[float, ...], slowest: int | None,
                                                      why: str) -> None:
    job = content(*(rank(number, waiting=share) for number, share in enumerate(waiting)))
    summary = summarize(parse(job), None, NOW)
    assert summary.slowest == slowest
    assert why in summary.why


def test_the_cause_weighs_the_delays_against_the_cost() -> None:
    late = rank(1, waiting=0.0, cores=0.1, delayed=0.4)
    for waiting, words in ((0.94, "or a sleep"), (0.5, "Other processes")):
        assert words in summarize(parse(content(rank(0, waiting=waiting), late)), None, NOW).why


def test_stalls_name_the_ranks_that_are_missing() -> None:
    def waits(number: int, **since: float) -> dict[str, Any]:
        return rank(number, outstanding=[{"name": name, "since_s": s} for name, s in since.items()])

    summary = summarize(parse(content(waits(0, a=7.0, b=30.0), waits(1, a=6.0), waits(2, c=1.0))), None, NOW)
    assert summary.stalls == (Stall("b", 30.0, (0,), (1, 2)), Stall("a", 7.0, (0, 1), (2,)))


def test_ranks_and_jobs_that_are_silent_are_told() -> None:
    summary = summarize(parse(content(rank(0), rank(1, written=NOW - 20))), None, NOW + 30)
    assert summary.silent_s == 30.0
    assert [line.silent_s for line in summary.ranks] == [0.0, 20.0]


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def job(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job whose file is written anew while the command waits: 22 steps in 2.2 s, and rank 1 is slow."""
    written = time.time()
    first = content(rank(0, waiting=0.5, computing=0.4, hidden=0.31, written=written),
                    rank(1, waiting=0.02, computing=0.9, written=written), written=written, started=written - 90)
    path = put(directory, first)
    monkeypatch.setattr(top, "time", SimpleNamespace(  # not time.sleep itself, which other threads call
        time=time.time, sleep=lambda seconds: put(directory, later(first, seconds, 22))))
    return path


@pytest.mark.parametrize("words", [[], ["--once"]], ids=["no terminal", "--once"])
def test_once(words: list[str], job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", *words]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "train.py 2 ranks on 1 host" in out
    assert "10 steps and 640 rows per second of all ranks; communication 31% of the time, " \
           "50% of it during the backward pass The slowest" in out
    assert "The slowest is rank 1: the others wait 50% of the time, and this rank 2%. It computes" in out
    assert "1.00 GB" in out


def test_once_as_json(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "digits", "--once", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    summary, = printed["jobs"]
    assert summary["rows_per_s"] == pytest.approx(640.0)
    assert (summary["slowest"], summary["ranks"][1]["waiting"]) == (1, 0.02)


@pytest.mark.parametrize("words", [[], ["--json"]], ids=["alone", "and JSON"])
def test_a_picture(words: list[str], job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", *words, "--svg", str(tmp_path / "top.svg")]) == 0
    assert not words or len(json.loads(capsys.readouterr().out)["jobs"]) == 1
    text = "".join(xml.etree.ElementTree.parse(tmp_path / "top.svg").getroot().itertext())
    assert "train.py" in text.replace("\xa0", " ")
    assert "url(http" not in (tmp_path / "top.svg").read_text()  # A font, for example.
    assert main(["top", "--svg", str(tmp_path / "none" / "top.svg")]) == 2
    assert "none/top.svg cannot be written: No such file" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["-1", "0", "nan", "inf", "1e10", "x"])
def test_an_interval_that_cannot_be_slept_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match=f"--interval: {text} is not a number of seconds above 0"):
        top._parser().parse_args(["--interval", text])


def test_with_a_wrong_name_the_jobs_are_listed(directory: Path, job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(directory, content(rank(0), job="other-3", script="b.py", started=NOW, written=time.time()), "other.json")
    assert main(["top", "digit5"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("No job or script has a name that begins with digit5. Running jobs: other-3 (b.py)")


def test_several_jobs_are_listed_and_one_is_chosen_by_its_beginning(directory: Path, job: Path,
                                                                    capsys: pytest.CaptureFixture[str]) -> None:
    put(directory, content(rank(0), job="other-3", script="b.py", written=time.time()), "other.json")
    assert main(["top", "--once"]) == 0
    out = capsys.readouterr().out
    assert "digits-17" in out and "other-3" in out and "To show one job, type: mpistrat top JOB" in out
    for name in "other", "b.py":
        assert main(["top", name, "--once"]) == 0
        assert "b.py" in (out := capsys.readouterr().out) and "digits-17" not in out


def test_without_a_job_the_reason_is_said(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(directory, "{")
    assert main(["top"]) == 1
    out = capsys.readouterr().out
    assert "not shown: " in out and "is truncated, or is not JSON" in out
    assert f"No job of yours runs on this host ({directory})" in out


def test_it_is_drawn_until_the_job_has_ended_and_another_job_takes_no_place(
        directory: Path, job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = threading.Event()

    def sleep(_: float) -> None:
        if drawn.is_set():
            job.unlink()
        else:
            put(directory, content(rank(0), job="other-3", script="b.py", written=time.time()), "other.json")
        drawn.set()

    monkeypatch.setattr(top, "time", SimpleNamespace(time=time.time, sleep=sleep))
    assert main(["top", "--prometheus", str(directory / "jobs")]) == 0
    *drawings, last = capsys.readouterr().out.splitlines()
    assert last.endswith(" has ended (digits-17). Others run: other-3 (b.py).")
    assert not any("b.py" in line for line in drawings)


def test_metrics_for_prometheus(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("prometheus_client")
    assert main(["top", "--once", "--prometheus", str(tmp_path / "m.prom")]) == 0
    lines = (tmp_path / "m.prom").read_text().splitlines()
    assert 'mpistrat_steps_total{host="node1",job="digits-17",rank="1"} 122.0' in lines
    assert 'mpistrat_share{host="node1",job="digits-17",rank="1",what="waiting"} 0.02' in lines
    assert main(["top", "--once", "--prometheus", str(tmp_path / "none" / "m.prom")]) == 2
    assert "Name a file in a directory to which you may " in capsys.readouterr().err


@pytest.mark.parametrize("package, words", [("prometheus_client", ["--prometheus", "f"]), ("rich", ["--once"])])
def test_what_is_not_installed_is_named(job: Path, monkeypatch: pytest.MonkeyPatch, package: str, words: list[str],
                                        capsys: pytest.CaptureFixture[str]) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    for name in (package, "rich.console"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["top", *words]) == 2
    assert f"({pip_extra('top')})" in capsys.readouterr().err


def test_the_file_of_a_real_job_is_understood(directory: Path) -> None:
    code = "import mpistrat, sys; mpistrat.init(); mpistrat.allreduce([1.0]); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as job:
        try:
            until = time.monotonic() + 60
            while not list(directory.glob("*.json")) and time.monotonic() < until:
                time.sleep(0.05)
            found = read(directory, os.getuid(), time.time())
        finally:
            job.communicate(b"")
    assert not found.problems
    status, = found.jobs
    assert (status.size, [rank.pid for rank in status.ranks]) == (1, [job.pid])
    assert summarize(status, None, time.time()).why == "the job has only one rank"
    assert not list(directory.glob("*.json"))
