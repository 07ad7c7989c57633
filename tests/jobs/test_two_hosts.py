"""Ranks on two hosts: what they see, what they reduce, and how their job ends."""

import json
import sys
import uuid
from pathlib import Path

import psutil
import pytest

from mpistrat.core.settings import Settings
from mpistrat.trace.analysis import analyse, last_submissions
from mpistrat.trace.timeline import records_in

from ..support.hosts_in_namespaces import Ended, Hosts, Link, several_hosts, two_hosts
from ..support.jobs import JOB_VARIABLE, find_mpirun
from ..support.levels import sample


@pytest.mark.nightly
def test_the_hosts_are_a_pair_without_a_way_out(hosts: Hosts) -> None:
    job = hosts.run([1, 1], ["sh", "-c", "echo $(hostname): $(ip -o route)"])
    first, second = hosts.names
    # mpirun itself may have something to say, too.
    routes = [line.split(" dev ")[0] for line in job.output.splitlines() if " dev " in line]
    assert sorted(routes) == [f"{first}: 10.200.77.0/24", f"{second}: 10.200.77.0/24"], job.output


# By how the ranks are placed: the host of each rank, local_rank and local_size, cross_rank and cross_size.
PLACES = {
    "2 and 2": ([2, 2], "slot", [0, 0, 1, 1], [[0, 2], [1, 2], [0, 2], [1, 2]], [[0, 2], [0, 2], [1, 2], [1, 2]]),
    "taking turns": ([2, 2], "node", [0, 1, 0, 1], [[0, 2], [0, 2], [1, 2], [1, 2]], [[0, 2], [1, 2], [0, 2], [1, 2]]),
    "3 and 1": ([3, 1], "slot", [0, 0, 0, 1], [[0, 3], [1, 3], [2, 3], [0, 1]], [[0, 2], [0, 1], [0, 1], [1, 2]]),
}


@pytest.mark.nightly
@pytest.mark.horovod("ranks")
@pytest.mark.parametrize("placement", PLACES)
def test_every_rank_sees_the_topology(hosts: Hosts, placement: str) -> None:
    ranks_per_host, map_by, host_of, local, cross = PLACES[placement]
    job = hosts.run(ranks_per_host, ["python", "tests/scripts/hosts_seen.py"], map_by=map_by).well()
    addresses = [f"{hosts.names[host]}:{7000 + rank}" for rank, host in enumerate(host_of)]
    for rank, host in enumerate(host_of):
        line, = job.of_rank(rank)
        assert json.loads(line) == {
            "name": hosts.names[host], "hosts": list(hosts.names), "size": 4, "local": local[rank],
            "cross": cross[rank], "is_homogeneous": ranks_per_host[0] == ranks_per_host[1],
            "role": "worker" if rank else "chief",
            "cluster_spec": {
                "cluster": {"chief": addresses[:1], "worker": addresses[1:]},
                "task": {"type": "worker", "index": rank - 1} if rank else {"type": "chief", "index": 0}},
        }, job.output


@sample("placement", PLACES)
def test_every_collective_is_right_on_every_rank(hosts: Hosts, placement: str) -> None:
    ranks_per_host, map_by, *_ = PLACES[placement]
    before = hosts.wire_bytes()
    job = hosts.run(ranks_per_host, ["python", "tests/scripts/all_collectives.py"], map_by=map_by).well()
    print(f"{placement}: {hosts.wire_bytes() - before:,} bytes on the wire, {job.seconds:.1f} s")
    for rank in range(4):
        assert job.of_rank(rank) == ["allreduce", "allgather", "broadcast", "objects", "another order on each rank",
                                     "barriers"], job.output


@pytest.mark.nightly
@pytest.mark.parametrize("ranks_per_host", [[1, 1], [1, 2]], ids=["one each", "one and two"])
def test_ranks_that_wait_in_all_ways_get_what_they_wait_for(hosts: Hosts, ranks_per_host: list[int]) -> None:
    job = hosts.run(ranks_per_host, ["python", "tests/scripts/waits_of_all_kinds.py", "300", "3"])
    job.assert_each_says(sum(ranks_per_host), lambda rank: f"rank {rank}: 300 steps in one thread, and in 3")


@sample("ranks_per_host", [[1, 1], [2, 2], [1, 3]])
def test_an_allreduce_of_two_hosts_sends_every_byte_once_in_each_direction(hosts: Hosts,
                                                                           ranks_per_host: list[int]) -> None:
    size, times = 2**23, 4
    before = hosts.wire_bytes()
    hosts.run(ranks_per_host, ["python", "tests/scripts/large_allreduce.py", str(size), str(times)]).well()
    sent = hosts.wire_bytes() - before
    print(f"{times} all-reduces of {size:,} bytes: {sent:,} bytes on the wire")
    # Each of two hosts sends half of the array to be summed, and half of the sum.
    assert 1 <= sent / (2 * size * times) < 1.05


@pytest.mark.parametrize("ranks_per_host", [
    [1, 1, 1], *(pytest.param(ranks, marks=pytest.mark.nightly) for ranks in ([2, 2, 2], [1, 1, 1, 1], [2, 1, 2, 1]))])
def test_an_allreduce_of_more_hosts_sends_every_byte_twice_but_for_the_own_part(ranks_per_host: list[int]) -> None:
    size, times = 2**23, 4
    with several_hosts(len(ranks_per_host)) as made:
        before = made.wire_bytes()
        job = made.run(ranks_per_host, ["python", "tests/scripts/large_allreduce.py", str(size), str(times)])
        sent = made.wire_bytes() - before
    print(f"{times} all-reduces of {size:,} bytes: {sent:,} bytes on the wire")
    assert job.code == 0, job.output
    # 2 (H - 1) / H of the bytes from each of H hosts.
    assert 1 <= sent / (2 * (len(ranks_per_host) - 1) * size * times) < 1.05


@pytest.mark.nightly
def test_an_exception_on_the_second_host_ends_the_job_with_its_traceback(hosts: Hosts, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    job = hosts.run([1, 1], ["python", "tests/scripts/one_rank_ends.py", "raises", "are busy", str(mark)])
    print(f"ended {job.ended_at - float(mark.read_text()):.2f} s after the exception")
    assert job.code != 0, job.output
    assert "RuntimeError: failed on purpose" in job.output, job.output
    assert f"[mpistrat] rank 1 on {hosts.names[1]} ends the job: " in job.output, job.output
    assert job.left == (), job.output


@pytest.mark.nightly
def test_ranks_of_different_hosts_with_different_numbers_of_steps_are_told_so(hosts: Hosts) -> None:
    job = hosts.run([1, 2], ["python", "tests/scripts/unequal_steps.py"]).well()
    assert job.of_rank(2) == ["returned 3.0"] * 3 + ["ends"], job.output
    for rank in (0, 1):
        error = job.of_rank(rank)[3]
        assert "wait for ranks [2], which have already shut down (after 3 operations)" in error, job.output
        assert job.of_rank(rank)[-1] == "ends", job.output


@pytest.mark.nightly
def test_a_stall_among_hosts_fails_on_every_rank(hosts: Hosts) -> None:
    job = hosts.run([1, 2], ["python", "tests/scripts/stalled.py", "for nothing"], env={
        "MPISTRAT_STALL_CHECK_TIME_SECONDS": "0.5", "MPISTRAT_STALL_SHUTDOWN_TIME_SECONDS": "2"}).well()
    for rank in range(3):
        error = job.of_rank(rank)[-2]
        assert error.startswith("StallError: ") and "lonely: ranks [0, 2] have waited " in error, job.output
        assert job.of_rank(rank)[-1] == "ends", job.output


# -- a network that fails ---------------------------------------------------------------------------------------------

LIMIT_S = 3.0
# The ranks of each host, the collective, its bytes, when the link is cut, and what reduces. Small ones are agreed on by
# vote, or, with MPI alone, by rank 0, which then cannot tell the other host; large ones are on the wire.
CUTS = {
    "an all-reduce under vote": (2, "allreduce", 4000, "between", "auto"),
    "chunks of an all-reduce": (1, "allreduce", 64_000_000, "within", "auto"),
    "a broadcast": (2, "broadcast", 32_000_000, "within", "auto"),
    "an all-reduce by MPI": (2, "allreduce", 4000, "between", "mpi"),
}


@sample("during", CUTS)
def test_a_link_that_is_cut_for_good_ends_every_rank(hosts: Hosts, tmp_path: Path, during: str) -> None:
    per_host, kind, nbytes, when, backend = CUTS[during]
    command = ["python", "tests/scripts/over_a_link.py", kind, str(nbytes), when, "0", str(tmp_path)]
    with hosts.mended_after():
        job = hosts.run_until_ranks_end([per_host] * 2, command, limit_s=60, env={
            **stalls_after(LIMIT_S), "MPISTRAT_CPU_OPERATIONS": backend})
    all_had_an_error_after_the_cut(hosts, tmp_path, job, 2 * per_host)
    # What the far host prints cannot reach the launcher.
    for rank in range(per_host):
        assert f"[mpistrat] rank {rank} on {hosts.names[0]} ends the job: " in job.output, job.output


@pytest.mark.nightly
def test_ranks_that_catch_the_error_for_a_link_that_is_cut_end_nevertheless(hosts: Hosts, tmp_path: Path) -> None:
    command = ["python", "tests/scripts/over_a_link.py", "allgather", "16000000", "within", "0", str(tmp_path),
               "caught"]
    with hosts.mended_after():
        job = hosts.run_until_ranks_end([2, 2], command, limit_s=60, env=stalls_after(LIMIT_S))
    all_had_an_error_after_the_cut(hosts, tmp_path, job)
    assert f"on {hosts.names[0]} ends the job: shutdown: rank " in job.output, job.output


@pytest.mark.nightly
def test_a_host_that_does_not_answer_ends_every_rank(hosts: Hosts, tmp_path: Path) -> None:
    command = ["python", "tests/scripts/over_a_link.py", "allreduce", "4000", "between", "0", str(tmp_path)]
    with hosts.mended_after():
        job = hosts.run_until_ranks_end([2, 2], command, limit_s=60, env={"MPISTRAT_LOST_AFTER_S": "2"})
    first, second = hosts.names
    assert (f"rank 0 on {first} ends the job: this rank has lost rank 2 on {second} (its host is lost: no answer for 2 "
            "s); rank 3 on ") in job.output, job.output
    # What is beyond the limit is for the far host, whose ranks do not hear of an end of the job.
    assert job.ended_at - float((tmp_path / "cut").read_text()) < 30, job.output


@pytest.mark.nightly
def test_ranks_recover_over_two_hosts(hosts: Hosts) -> None:
    job = hosts.run([2, 2], ["python", "tests/scripts/ranks_lost.py", "eager", "0", "0.2"],
                    mpirun_args=["--with-ft", "ulfm", "--mca", "coll", "^han"]).well()
    assert job.output.count("went on as rank") == 3, job.output


def stalls_after(seconds: float) -> dict[str, str]:
    """The settings with which this is the only limit."""
    return {"MPISTRAT_LOST_AFTER_S": "0", "MPISTRAT_STALL_CHECK_TIME_SECONDS": "1",
            "MPISTRAT_STALL_SHUTDOWN_TIME_SECONDS": str(seconds)}


def all_had_an_error_after_the_cut(hosts: Hosts, told: Path, job: Ended, ranks: int = 4) -> None:
    """Every rank has had an error that names the hosts, in time, and has ended soon after it."""
    cut_at = float((told / "cut").read_text())
    for rank in range(ranks):
        assert (told / str(rank)).exists(), f"rank {rank} has said nothing. {job.output}"
        at, _, error = (told / str(rank)).read_text().partition(" ")
        assert error.startswith("StallError: "), error
        assert "the network between the hosts " in error, error
        assert all(name in error for name in hosts.names), error
        print(f"rank {rank}: {float(at) - cut_at:.1f} s after the cut")
        # Rank 0 has the limit to decide, and its decision some time to arrive. The rest is for a busy machine.
        assert float(at) - cut_at < 2 * LIMIT_S + 10, error
    print(f"all ranks had ended {job.ended_at - cut_at:.1f} s after the cut")
    assert job.ended_at - cut_at < 2 * LIMIT_S + 20, job.output


@pytest.mark.nightly
def test_a_link_that_is_down_for_some_seconds_is_survived(hosts: Hosts, tmp_path: Path) -> None:
    with hosts.mended_after():
        job = hosts.run([2, 2], ["python", "tests/scripts/over_a_link.py", "allreduce,broadcast,allgather", "4000000",
                                 "within", "8", str(tmp_path)], env={"MPISTRAT_LOST_AFTER_S": "20"})
    assert job.code == 0, job.output
    assert [len(job.of_rank(rank)) for rank in range(4)] == [1] * 4, job.output
    assert job.ended_at - float((tmp_path / "cut").read_text()) > 8, job.output


@pytest.mark.nightly
@pytest.mark.parametrize("link", [Link(delay_s=0.03), Link(loss=0.01), Link(bits_per_s=1e8)],
                         ids=["30 ms", "1 % lost", "100 Mbit/s"])
def test_collectives_are_right_over_a_poor_link(link: Link, tmp_path: Path) -> None:
    with two_hosts(link) as made:
        before = made.wire_bytes()
        job = made.run([2, 2], ["python", "tests/scripts/over_a_link.py", "allreduce,broadcast,allgather", "100000",
                                "never", "0", str(tmp_path)])
        sent = made.wire_bytes() - before
    assert job.code == 0, job.output
    assert [len(job.of_rank(rank)) for rank in range(4)] == [1] * 4, job.output
    # Each of three collectives in eight steps takes one trip at least, and half of the bytes go each way.
    assert job.seconds > max(3 * 8 * link.delay_s, link.bits_per_s and 8 * sent / 2 / link.bits_per_s), job.output


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["sleep", "reduce", "wait at the end"])
def test_the_ranks_of_both_hosts_end_when_mpirun_was_killed(hosts: Hosts, tmp_path: Path, way: str) -> None:
    # Of two ranks on a host one has no connection to the other host, so that MPI does not end it.
    mark = tmp_path / "mark"
    job = hosts.run_until_ranks_end([2, 2], ["python", "tests/scripts/launcher_dies.py", way, str(mark), "kills"],
                                    env={}, limit_s=60)
    seconds = job.ended_at - float(mark.read_text())
    print(f"all ranks had ended {seconds:.1f} s after mpirun")
    # As in test_failures.py, the ranks look every second, and the rest is for a busy machine.
    assert seconds < 10, job.output


@pytest.mark.nightly
def test_ranks_of_both_hosts_have_time_to_save_after_sigterm(hosts: Hosts) -> None:
    first, second = hosts.names
    # Open MPI's mpirun kills ranks one second after a SIGTERM of its own.
    job = hosts.run_line([sys.executable, "-m", "mpistrat", "run", "-np", "2", "-H", f"{first}:1,{second}:1",
                          "tests/scripts/saves_at_sigterm.py", "3"]).well()
    assert sorted(job.output.splitlines()) == [f"rank {rank} has saved after 1 signals" for rank in range(2)]


# -- the launcher, and clusters ---------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_setting_that_mpirun_does_not_pass_on_is_an_error_on_every_rank(hosts: Hosts) -> None:
    first, second = hosts.names
    job = hosts.run_line([str(find_mpirun()), "--host", f"{first}:1,{second}:1", "--map-by", "slot", "-x", "PYTHONPATH",
                          "-x", "MPISTRAT_RECORDER", sys.executable, "tests/scripts/init_only.py"],
                         env={"MPISTRAT_CACHE_CAPACITY": "7"})
    for rank in range(2):
        line, = job.of_rank(rank)
        assert line == ("SettingsError: MPISTRAT_CACHE_CAPACITY: the ranks disagree: 7 on ranks [0]; "
                        f"{Settings().cache_capacity} on ranks [1]."), job.output


@pytest.mark.nightly
def test_mpistrat_run_passes_settings_and_the_path_on(hosts: Hosts) -> None:
    first, second = hosts.names
    job = hosts.run_line([sys.executable, "-m", "mpistrat", "run", "-np", "3", "-H", f"{first}:1,{second}:2", "--",
                          sys.executable, "tests/scripts/init_only.py"], env={"MPISTRAT_CACHE_CAPACITY": "7"}).well()
    assert [job.of_rank(rank) for rank in range(3)] == [["returned 3.0"]] * 3, job.output


@pytest.mark.nightly
def test_doctor_measures_the_link_between_hosts_and_says_that_it_is_slow() -> None:
    with two_hosts(Link(delay_s=0.005, bits_per_s=4e7)) as made:
        slots = ",".join(f"{name}:1" for name in made.names)
        job = made.run_line([sys.executable, "-m", "mpistrat", "doctor", "-H", slots, "--json"])
    found = json.loads(job.output[job.output.index("{\n"):job.output.rindex("\n}") + 2])
    assert [each["host"] for each in found["observed"]["facts"]] == list(made.names), job.output
    link, = found["observed"]["links"]
    assert 5e5 < link["bytes_per_s"] < 6e6
    assert 0.004 < link["latency_s"] < 0.1
    texts = [each["text"] for each in found["findings"] if each["subject"] == "links"]
    assert any("MB per second between" in text for text in texts), texts
    assert any("a message needs" in text for text in texts), texts
    assert job.code == 0, job.output  # A slow link fails no job.


@pytest.mark.nightly
def test_doctor_says_that_mpi_does_not_get_through_between_hosts(hosts: Hosts) -> None:
    slots = ",".join(f"{name}:1" for name in hosts.names)
    job = hosts.run_line([sys.executable, "-m", "mpistrat", "doctor", "-H", slots],
                         env={"OMPI_MCA_btl": "tcp,self", "OMPI_MCA_btl_tcp_if_include": "lo"})
    assert (job.code, job.left) == (1, ()), job.output
    assert "do not reach each other over MPI, although the ranks have started" in job.output
    assert "1 failure, " in job.output


@pytest.mark.nightly
def test_a_cluster_has_addresses_by_which_the_hosts_reach_each_other(hosts: Hosts) -> None:
    job = hosts.run([2, 2], ["python", "tests/scripts/cluster_formed.py"]).well()
    first, second = hosts.addresses
    for rank in range(4):
        line, = job.of_rank(rank)
        spec = {role: [address.rpartition(":")[0] for address in addresses]
                for role, addresses in json.loads(line).items()}
        assert spec == {"chief": [first], "worker": [first, second], "ps": [second]}, job.output


@pytest.mark.nightly
def test_a_coordinator_trains_with_workers_and_a_parameter_server_of_another_host(hosts: Hosts) -> None:
    job = hosts.run([2, 2], ["python", "examples/parameter_server.py", "--epochs", "3"], limit_s=200).well()
    assert ", 2 workers" in job.output, job.output


@pytest.mark.nightly
def test_mpistrat_run_ends_a_job_whose_hosts_are_cut_off_from_each_other(tmp_path: Path) -> None:
    """mpirun waits for the other host for ever, although all ranks have ended."""
    with two_hosts() as made:
        first, second = made.names
        job = made.run_line([sys.executable, "-m", "mpistrat", "run", "-np", "4", "-H", f"{first}:2,{second}:2", "--",
                             sys.executable, "tests/scripts/cut_and_raise.py", str(tmp_path / "mark")])
    assert job.code == 1, job.output
    assert "RuntimeError: failed on purpose\n" in job.output, job.output
    assert "a rank ended the job, and mpirun has not ended within 15 s; mpirun gets SIGTERM\n" in job.output
    assert job.output.splitlines()[-1].startswith("mpistrat run: the job has ended with exit code 1"), job.output


@pytest.mark.nightly
def test_nothing_is_left_of_hosts() -> None:
    sleep = ["sleep", str(600 + uuid.uuid4().int % 10**6 / 10**6)]

    def sleeping() -> bool:
        return any(process.info["cmdline"] == sleep for process in psutil.process_iter(["cmdline"]))

    with two_hosts() as made:
        # Nobody but the kernel knows of this process, as it does not bear the mark of a job.
        made.run_line(["sh", "-c", f"env -u {JOB_VARIABLE} setsid {' '.join(sleep)} > /dev/null 2>&1 &"])
        assert sleeping()
        directory = made.directory
        assert directory.exists()
    assert not sleeping()
    assert not directory.exists()


@pytest.mark.nightly
def test_one_timeline_has_the_ranks_of_both_hosts(hosts: Hosts, tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    job = hosts.run([2, 2], ["python", "tests/scripts/timeline_steps.py", str(path), "5"]).well()
    records = records_in(str(path))[0]
    assert sorted({(each.rank, each.step, each.name) for each in records}) == [
        (rank, step, f"gradient/{place}") for rank in range(4) for step in range(5) for place in range(2)], job.output
    # One clock: no rank learns that all have submitted before the last one has.
    last = last_submissions(records)
    assert all(each.agreed > last[each.process_set, each.number] for each in records)
    assert analyse(records).stragglers[0].rank == 1
    assert f"rank 3 on {hosts.names[1]}".encode() in path.read_bytes()
