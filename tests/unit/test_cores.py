"""Shares of the cores of a host, on made-up hosts; and what init() makes of the CPUs that the ranks may use."""

import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from mpistrat.api.runtime import bind_cores
from mpistrat.core.topology import Topology
from mpistrat.process import cores
from mpistrat.process.cores import gpu_cpus, parse_list, physical_cores, share
from mpistrat.process.launchers import local_rank

ROOT = Path(__file__).parents[2]


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """Two sockets of four cores of two hardware threads: CPUs 0-3, 8-11 on the first, 4-7, 12-15 on the second."""
    for cpu in range(16):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{cpu % 8 // 4}\n")
        (topology / "thread_siblings_list").write_text(f"{cpu % 8},{cpu % 8 + 8}\n")
    return tmp_path


def shares(cpus: Sequence[int], size: int, system: Path, near: Sequence[frozenset[int]] = ()) -> list[set[int] | None]:
    return [share(frozenset(cpus), rank, size, near, system) for rank in range(size)]


def test_a_list_is_as_linux_writes_it() -> None:
    assert parse_list("0-2,8,10-11\n") == {0, 1, 2, 8, 10, 11}
    assert parse_list("\n") == set()


@pytest.mark.parametrize(("cpus", "size", "expected"), [
    (range(16), 2, [{0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}]),
    (range(16), 3, [{0, 1, 8, 9}, {2, 3, 10, 11}, {4, 5, 12, 13}]),  # All have as many, and the rest stays free.
    ([1, 2, 5, 6], 2, [{1, 2}, {5, 6}]), ([0, 8, 1], 3, [None] * 3)])
def test_a_rank_has_whole_cores_of_one_socket(cpus: Sequence[int], size: int, expected: list, system: Path) -> None:
    assert physical_cores(range(16), system) == [{cpu, cpu + 8} for cpu in range(8)]
    assert shares(cpus, size, system) == expected


def test_without_a_topology_each_cpu_is_a_core(tmp_path: Path) -> None:
    assert shares([3, 5, 7, 9], 2, tmp_path) == [{3, 5}, {7, 9}]


def test_ranks_are_near_their_gpus(system: Path) -> None:
    first, second = parse_list("0-3,8-11"), parse_list("4-7,12-15")
    assert shares(range(16), 2, system, [second, first]) == [second, first]
    assert shares(range(16), 3, system, [second, first, second]) == [{4, 5, 12, 13}, first, {6, 7, 14, 15}]
    assert shares(range(16), 2, system, [first]) == [first, second], "not each rank has a GPU"
    assert shares(range(8), 2, system, [parse_list("0-4"), parse_list("3-7")]) == [{0, 1, 2, 3}, {4, 5, 6, 7}]


def test_the_cpus_near_gpus_come_in_the_order_of_the_bus(tmp_path: Path) -> None:
    for bus, cpus in {"0000:81:00.0": "4-7", "0000:01:00.0": "0-3"}.items():
        (tmp_path / "gpus" / bus).mkdir(parents=True)
        (tmp_path / "pci" / bus).mkdir(parents=True)
        (tmp_path / "pci" / bus / "local_cpulist").write_text(cpus)
    assert gpu_cpus(tmp_path / "gpus", tmp_path / "pci") == [{0, 1, 2, 3}, {4, 5, 6, 7}]
    assert gpu_cpus(tmp_path / "none", tmp_path / "pci") == []


def test_mpirun_says_the_place_among_the_ranks_of_the_host() -> None:
    assert local_rank({"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}) == (1, 4)
    assert local_rank({"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}) == (0, 2)
    assert local_rank({"OMPI_COMM_WORLD_LOCAL_RANK": "1"}) is None


TWO = Topology(1, ("a", "a", "b"))


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> list[set[int]]:
    found: list[set[int]] = []
    monkeypatch.setattr(cores, "take", lambda cpus: found.append(set(cpus)))
    caplog.set_level(logging.DEBUG, "mpistrat")
    return found


def test_ranks_that_nobody_has_bound_share_the_cores(taken: list[set[int]], caplog: pytest.LogCaptureFixture) -> None:
    bind_cores(TWO, [[100, 101], [100, 101], [100, 101]], "all")
    assert taken == [{101}]
    assert "rank 1: runs on 1 CPUs of a, its share: 101" in caplog.text


@pytest.mark.parametrize(("cpus_of", "wanted", "why"), [
    ([[100], [101], [100]], "all", "as it was started"), ([[100], [100], [100]], "cores", "fewer cores than its"),
    ([[100, 101]] * 3, "gpu", "MPISTRAT_BIND=gpu"), ([[100, 101]] * 3, "none", "MPISTRAT_BIND=none"),
    ([[]] * 3, "all", "")])
def test_others_stay_as_they_are(cpus_of: list[list[int]], wanted: str, why: str, taken: list[set[int]],
                                 caplog: pytest.LogCaptureFixture) -> None:
    bind_cores(TWO, cpus_of, wanted)
    assert taken == []
    assert why in caplog.text and (why or not caplog.text)


def test_an_affinity_that_is_refused_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(cpus: object) -> None:
        raise PermissionError("not permitted")

    monkeypatch.setattr(cores, "take", refuse)
    caplog.set_level(logging.DEBUG, "mpistrat")
    bind_cores(TWO, [[100, 101]] * 3, "all")
    assert "because it cannot be bound: not permitted" in caplog.text


def test_ranks_that_the_launcher_has_bound_to_one_of_many_cores_are_told_how_to_have_more(
        taken: list[set[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(100, 108)))
    for rank in range(2):
        bind_cores(Topology(rank, ("a", "a")), [[100], [101]], "all")
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "one of 8 cores" in warnings[0] and "--map-by slot:PE=4" in warnings[0]
    assert taken == []


AFFINITY = "import os; print(sorted(os.sched_getaffinity(0)), 'numpy' in __import__('sys').modules)"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU cannot be shared")
@pytest.mark.parametrize(("env", "is_shared"), [({"_MPISTRAT_CORES": "1"}, True), ({}, False),
                                                ({"_MPISTRAT_CORES": "report"}, True),
                                                ({"_MPISTRAT_CORES": "1", "MPISTRAT_BIND": "gpu"}, False),
                                                ({"_MPISTRAT_CORES": "1", "MPISTRAT_BIND": "Cores"}, True)])
def test_a_rank_of_mpistrat_run_takes_its_share_before_any_import(env: dict[str, str], is_shared: bool) -> None:
    from mpistrat.cli.rank_command import report_variables
    own = sorted(os.sched_getaffinity(0))
    environ = {"PATH": os.environ.get("PATH", os.defpath), "OMPI_COMM_WORLD_RANK": "1", **env,
               "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    environ |= report_variables(["python"], True, environ, False)
    done = subprocess.run([sys.executable, "-c", AFFINITY], env=environ, capture_output=True, text=True, timeout=100)
    expected = sorted(share(frozenset(own), 1, 2) or own) if is_shared else own
    assert done.stdout == f"{expected} False\n", done.stderr
    said = [line for line in done.stderr.splitlines() if "runs on" in line]
    assert said == ([f"mpistrat: rank 1 runs on CPUs {','.join(map(str, expected))}"]
                    if env.get("_MPISTRAT_CORES") == "report" else [])


@pytest.mark.parametrize("error", [PermissionError("not permitted"), OSError(22, "Invalid argument")])
def test_a_rank_of_mpistrat_run_that_may_not_be_bound_starts(error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(thread: int, cpus: object) -> None:
        asked.append(cpus)
        raise error

    # Not under the name that Python imports, which would make this process a rank.
    spec = importlib.util.spec_from_file_location("startup_of_a_rank", ROOT / "mpistrat/cli/startup/sitecustomize.py")
    assert spec is not None and spec.loader is not None
    startup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(startup)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {100, 101})
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    startup._take_cores("1", (1, 2))
    assert asked == [{101}]
