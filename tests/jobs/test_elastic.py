"""Jobs of `mpistrat run --elastic`: ranks end at chosen places, and the training goes on without a row lost."""

import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from mpistrat.elastic.agent import HOST_LOST_AFTER_S

from ..support.jobs import Finished, run_limited
from ..support.levels import sample

SCRIPT = "tests/scripts/elastic_steps.py"
EPOCHS = 2


def elastic(*options: str, script: Sequence[str] = (), way: str = "--elastic",
            watch: Callable[[str], None] | None = None, env: Mapping[str, str] | None = None) -> Finished:
    return run_limited([sys.executable, "-m", "mpistrat", "run", way, *options, sys.executable, SCRIPT, *script],
                       limit_s=90, watch=watch, env=env)


def supervisor_of(words: str) -> psutil.Process | None:
    """The supervisor that has these words in its command line."""
    found = (process for process in psutil.process_iter(["cmdline"])
             if {"--elastic", words} <= set(process.info["cmdline"] or []))
    return next(found, None)


def assert_whole(job: Finished, ranks: int, generation: int, most_twice: int) -> None:
    """The job has ended well, in this generation, and has trained each row in each epoch."""
    assert job.code == 0, job.output
    lines = re.findall(r"rank \d: of (\d+), generation (\d+), step \d+, each row at least (\d+) times, (\d+) more",
                       job.output)
    assert len(lines) == ranks, job.output
    for size, last, least, more in lines:
        assert (int(size), int(last), int(least)) == (ranks, generation, EPOCHS), job.output
        assert int(more) <= most_twice, job.output
    assert job.left == (), job.output


@pytest.mark.horovod("elastic-jobs")
@sample(("rank", "when"), [(0, "before"), (2, "after"), (0, "while"), (2, "while")])
def test_the_ranks_that_are_left_go_on_in_their_processes(rank: int, when: str) -> None:
    job = elastic("-np", "3", script=["--kill", f"1:{rank}:5:{when}"])
    # 60 rows on 3 ranks, then what is left on 2: at most one row is dealt out twice in an epoch, and a rank that dies
    # while it commits may have finished its step.
    assert_whole(job, ranks=2, generation=1, most_twice=2)
    assert "generation 1 goes on with 2 ranks" in job.output


@pytest.mark.nightly
def test_two_losses_one_after_the_other() -> None:
    job = elastic("-np", "4", script=["--kill", "1:3:4:after", "1:1:9:before"])
    assert_whole(job, ranks=2, generation=1, most_twice=4)


@pytest.mark.nightly
def test_a_rank_that_is_stopped_for_too_long_is_left_out() -> None:
    job = elastic("-np", "3", script=["--kill", "1:1:5:stop"], env={"MPISTRAT_STOPPED_LIMIT_S": "2"})
    assert_whole(job, ranks=2, generation=1, most_twice=2)
    assert "is killed: it has been stopped for 2 s (MPISTRAT_STOPPED_LIMIT_S)" in job.output


@pytest.mark.nightly
def test_with_new_processes_after_each_loss() -> None:
    job = elastic("-np", "2", script=["--kill", "1:1:5:before", "2:0:3:after"], way="--elastic=restart",
                  env={"MPISTRAT_RECORDER": "all"})
    assert_whole(job, ranks=2, generation=3, most_twice=0)
    assert "generation 2 starts with 2 ranks on localhost:2" in job.output
    assert "mpistrat timeline" not in job.output  # There is no file of a generation that was lost.


@pytest.mark.nightly
@pytest.mark.parametrize("door", [(), ("strategy",)], ids=["optimizer", "strategy"])
def test_the_state_of_a_lost_rank_is_in_the_commits(door: Sequence[str]) -> None:
    job = run_limited([sys.executable, "-m", "mpistrat", "run", "--elastic", "-np", "3", sys.executable,
                       "tests/scripts/elastic_sharded.py", *door], limit_s=150).well()
    assert "only new processes can divide the state of the sharded optimizer anew" in job.output
    lines = re.findall(r"rank \d: of \d, generation (\d), as one process: (\w+)", job.output)
    assert len(lines) >= 2 and set(lines) == {("2", "True")}, job.output


@pytest.mark.nightly
@pytest.mark.parametrize(("way", "ranks", "generation"), [("--elastic", 2, 1), ("--elastic=restart", 3, 2)])
def test_what_8_bit_numbers_have_rounded_off_is_in_the_commits(way: str, ranks: int, generation: int) -> None:
    job = run_limited([sys.executable, "-m", "mpistrat", "run", way, "-np", "3", sys.executable,
                       "tests/scripts/elastic_quantised.py"], limit_s=150).well()
    lines = re.findall(rf"rank \d: of {ranks} on 2 hosts, generation {generation}, rounded off (\S+), lost (\S+)",
                       job.output)
    assert len(lines) == ranks, job.output
    for rounded_off, lost in lines:
        assert float(rounded_off) > 0.001 and float(lost) < 0.0002, job.output


@pytest.mark.nightly
def test_a_script_that_always_fails_ends_the_job_with_its_error() -> None:
    job = run_limited([sys.executable, "-m", "mpistrat", "run", "--elastic", "-np", "2", sys.executable, "-c",
                       "import mpistrat; mpistrat.init(); raise ValueError('no such column')"], limit_s=90)
    assert job.code == 1, job.output
    assert "no such column" in job.output and "3 generations in a row have failed without a commit" in job.output
    assert job.left == (), job.output


EARLY = """
import os, pathlib, sys
left = sorted(pathlib.Path(sys.argv[1]).iterdir())
if os.environ["OMPI_COMM_WORLD_RANK"] == "1" and left:
    left[0].unlink()
    if "kill" in left[0].name:
        os.kill(os.getpid(), 9)
    raise FileNotFoundError("no such table")
import mpistrat
mpistrat.init()
print(f"rank {mpistrat.rank()}: sum {mpistrat.allreduce([1.0], op=mpistrat.Sum)}", flush=True)
"""


def test_a_rank_that_ends_before_init_is_reported_and_the_next_generation_starts(tmp_path: Path) -> None:
    for way in ("1 kill", "2 raise"):
        (tmp_path / way).touch()
    job = run_limited([sys.executable, "-m", "mpistrat", "run", "--elastic", "-np", "3", sys.executable, "-c", EARLY,
                       str(tmp_path)], limit_s=120).well()
    first, second, third = re.split(r"generation \d starts with 3 ranks", job.output)
    assert "ranks [1] ended before init()" in first
    assert "FileNotFoundError: no such table" in second
    assert third.count("sum [3.]") == 3


def processes_of(supervisor: psutil.Process) -> tuple[list[psutil.Process], list[psutil.Process]]:
    """All processes of the job, and those of them that are agents. A rank has started these."""
    children = supervisor.children(recursive=True)
    agents = [process for process in children if "mpistrat.elastic.agent" in process.cmdline()]
    return [supervisor, *children], agents


@pytest.mark.nightly
def test_no_commit_is_lost_with_a_agent_or_when_all_processes_are_stopped_for_a_while(tmp_path: Path) -> None:
    log, acted = tmp_path / "log", []

    def act(printed: str) -> None:
        supervisor = supervisor_of(str(log))
        if supervisor is None or not log.exists() or "step 2" not in log.read_text():
            return
        everything, agents = processes_of(supervisor)
        if not acted:
            agents[0].kill()
            acted.append(agents[0].pid)
        elif len(acted) == 1 and agents and agents[0].pid != acted[0]:
            for process in everything:
                process.suspend()
            time.sleep(HOST_LOST_AFTER_S + 2)
            for process in everything:
                process.resume()
            acted.append(agents[0].pid)

    job = elastic("-np", "2", script=["--pause", "0.3", "--log", str(log)], watch=act)
    assert_whole(job, ranks=2, generation=1, most_twice=0)
    assert len(acted) == 2 and "is lost" not in job.output and "has died" not in job.output


@pytest.mark.nightly
def test_training_goes_on_from_the_last_commit_after_the_supervisor_was_stopped(tmp_path: Path) -> None:
    log, stopped = tmp_path / "log", []

    def stop_supervisor(printed: str) -> None:
        supervisor = supervisor_of(str(log))
        if log.exists() and "step 2" in log.read_text() and supervisor is not None and not stopped:
            stopped.append(supervisor.pid)
            supervisor.suspend()
            time.sleep(HOST_LOST_AFTER_S + 2)
            supervisor.resume()

    job = elastic("-np", "2", script=["--pause", "0.5", "--log", str(log)], watch=stop_supervisor)
    assert_whole(job, ranks=2, generation=2, most_twice=0)
    assert " were ended: nothing has arrived from `mpistrat run` for 5." in job.output
    assert "training goes on from commit" in job.output and "IS LOST" not in job.output


@pytest.mark.nightly
def test_the_ranks_and_the_agent_end_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    log, agents = tmp_path / "log", []

    def kill_supervisor(printed: str) -> None:
        supervisor = supervisor_of(str(log))
        if log.exists() and supervisor is not None:
            agents.extend(processes_of(supervisor)[1])
            supervisor.kill()

    job = elastic("-np", "2", script=["--pause", "0.3", "--log", str(log)], watch=kill_supervisor)
    assert job.code == -signal.SIGKILL and job.left == (), job.output
    assert agents, job.output
    assert not psutil.wait_procs(agents, timeout=10)[1]


@pytest.mark.nightly
def test_a_supervisor_that_was_stopped_learns_what_the_ranks_have_done_meanwhile(tmp_path: Path) -> None:
    log, stopped = tmp_path / "log", []

    def stop_supervisor(printed: str) -> None:
        supervisor = supervisor_of(str(log))
        if log.exists() and supervisor is not None and not stopped:
            stopped.append(supervisor.pid)
            supervisor.suspend()
            time.sleep(HOST_LOST_AFTER_S + 1)
            supervisor.resume()

    # The ranks are done before the agent would end them, which has heard nothing either, unless the machine is busy.
    job = elastic("-np", "2", script=["--pause", "0.05", "--log", str(log)], watch=stop_supervisor)
    assert_whole(job, ranks=2, generation=2 if "generation 2 starts" in job.output else 1, most_twice=0)
    assert stopped and "is lost" not in job.output and "has died" not in job.output


def test_sigterm_ends_the_job_at_a_commit_and_the_next_job_goes_on_from_its_file(tmp_path: Path) -> None:
    log = tmp_path / "log"
    options, told = ("-np", "2", "--elastic-checkpoint", str(tmp_path)), []

    def terminate(printed: str) -> None:
        supervisor = supervisor_of(str(log))
        if log.exists() and supervisor is not None and len(log.read_text().splitlines()) > 4 and not told:
            told.append(supervisor.pid)  # A second signal would end the job at once.
            supervisor.send_signal(signal.SIGTERM)

    first = elastic(*options, script=["--pause", "0.3", "--log", str(log)], watch=terminate)
    assert first.code == 75, first.output
    assert "SIGTERM has arrived" in first.output and first.left == (), first.output
    done = max(int(step) for step in re.findall(r" step (\d+)$", log.read_text(), re.MULTILINE))
    second = elastic(*options, script=["--log", str(log)])
    assert_whole(second, ranks=2, generation=1, most_twice=0)
    assert re.search(rf"begins at step {done}\b", log.read_text()), log.read_text()


@pytest.mark.nightly
@pytest.mark.horovod("elastic-jobs")
def test_ranks_come_when_the_program_that_looks_for_hosts_finds_room(tmp_path: Path) -> None:
    hosts, log, find = tmp_path / "hosts", tmp_path / "log", tmp_path / "find.sh"
    hosts.write_text("localhost:1\n")
    find.write_text(f"#!/bin/sh\ncat {hosts}\n")
    find.chmod(0o755)

    def add(printed: str) -> None:
        if log.exists() and len(log.read_text().splitlines()) > 4:
            hosts.write_text("localhost:2\n")

    job = elastic("--max-np", "2", "--host-discovery-script", str(find),
                  script=["--pause", "0.3", "--log", str(log)], watch=add)
    assert_whole(job, ranks=2, generation=2, most_twice=2)
    assert "there is room for 2 ranks instead of 1" in job.output


@pytest.mark.nightly
@pytest.mark.parametrize(("example", "late_enough"), [("elastic_fit", "Epoch 2/"), ("elastic_loop", "epoch 1:")])
def test_an_example_goes_on_when_a_rank_is_killed(example: str, late_enough: str) -> None:
    printed, killed = [], []

    def kill(more: str) -> None:
        printed.append(more)
        found = re.search(r"rank 1 of 3 is process (\d+)", "".join(printed))
        if found and late_enough in "".join(printed) and not killed:
            killed.append(found[1])
            psutil.Process(int(found[1])).kill()

    job = run_limited([sys.executable, "-m", "mpistrat", "run", "--elastic", "-np", "3", sys.executable,
                       f"examples/{example}.py", "--epochs", "12"], limit_s=180, watch=kill)
    assert job.code == 0 and killed, job.output
    accuracy, ranks = re.findall(r"test accuracy (\d\.\d+), (\d) ranks at the end", job.output)[0]
    assert float(accuracy) > 0.8 and ranks == "2", job.output
    assert "goes on with 2 ranks" in job.output and job.left == (), job.output


@pytest.mark.nightly
@pytest.mark.parametrize("door", ["horovod", "strategy"])
def test_fit_leaves_out_no_batch_of_an_execution_and_no_gradient_of_an_update(door: str, tmp_path: Path) -> None:
    hosts, log, find = tmp_path / "hosts", tmp_path / "log", tmp_path / "find.sh"
    hosts.write_text("localhost:1\n")
    find.write_text(f"#!/bin/sh\ncat {hosts}\n")
    find.chmod(0o755)
    options = {"horovod": ["--elastic", "--max-np", "2", "--host-discovery-script", str(find)],
               "strategy": ["--elastic=restart", "-np", "2"]}[door]
    job = run_limited([sys.executable, "-m", "mpistrat", "run", *options, sys.executable,
                       "tests/scripts/elastic_executions.py", door, str(log), str(hosts)], limit_s=90).well()
    ended = re.findall(r"rank \d of 2: generation 2, weight (\S+)", job.output)
    assert len(ended) == 2, job.output
    assert set(map(int, log.read_text().split())) == set(range(48)), job.output
    if door == "strategy":
        # The mean of the rows of three updates: each has the gradients of both ranks from before the loss, too.
        assert ended == ["-70.5", "-70.5"], job.output


@pytest.mark.nightly
def test_a_commit_compares_the_weights_that_are_trained() -> None:
    job = run_limited([sys.executable, "-m", "mpistrat", "run", "--elastic", "-np", "3", sys.executable,
                       "tests/scripts/elastic_drift.py"], limit_s=180,
                      env={"MPISTRAT_CHECK_EVERY": "2"}).well()
    assert "in commit 2 the ranks have different weights, so they no longer train one model: the values of shared:0 " \
        "differ between ranks [0] and [1, 2]." in job.output
    # An error ends the generation, and the next one goes on from the commit before.
    assert "generation 2 starts" in job.output
    for rank in range(3):
        assert f"rank {rank}: after commit 2 [3.0, 4.0], own {rank}, statistics {rank}" in job.output
        assert f"rank {rank}: restored [4.0, 5.0]" in job.output


@pytest.mark.nightly
def test_a_commit_has_the_state_of_the_outer_optimizer() -> None:
    """Eight steps in an epoch, an outer step after 3, 4 (a commit), 7 and 8; the loss is in the second epoch."""
    job = run_limited([sys.executable, "-m", "mpistrat", "run", "--elastic=restart", "-np", "2", sys.executable,
                       "tests/scripts/elastic_local_sgd.py"], limit_s=90).well()
    said = re.findall(r"generation (\d), rank \d (\w+): step (\d+), outer steps (\d+), moves (\w+), (\w+)", job.output)
    assert len(said) == 6, job.output
    assert len(set(said)) == 3, job.output  # Both ranks have the same.
    assert [each[:5] for each in sorted(set(said))] == [
        ("1", "begins", "0", "0", "False"), ("2", "begins", "12", "6", "True"), ("2", "ends", "24", "12", "True")]
