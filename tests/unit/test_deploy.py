"""The files of docs/deploy: a Dockerfile, manifests of Kubernetes and batch scripts of Slurm. None is run here."""

import configparser
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mpistrat.cli.arguments import split_arguments
from mpistrat.cli.run import _parser

ROOT = Path(__file__).parent.parent.parent
FILES = ROOT / "docs" / "deploy"
PAGE = "".join((ROOT / "docs" / f"{page}.md").read_text() for page in ("deploy", "cluster"))
MANIFESTS = sorted(FILES.glob("*.yaml"))
SCRIPTS = sorted(FILES.glob("*.sh"))
needs_extra = "pip install 'mpistrat[test]'"


def test_the_pages_show_each_file_and_link_it_and_say_what_was_not_run() -> None:
    for file in FILES.iterdir():
        assert f"{{literalinclude}} deploy/{file.name}\n" in PAGE
        assert f"](deploy/{file.name})" in PAGE
    assert "**Not run:**" in PAGE
    assert len(MANIFESTS) == 3 and len(SCRIPTS) == 5


# -- containers -------------------------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, each with its text on one line."""
    parser = pytest.importorskip("dockerfile_parse", reason=needs_extra).DockerfileParser(
        str(FILES / "Dockerfile"), env_replace=False)
    return [(part["instruction"], part["value"]) for part in parser.structure if part["instruction"] != "COMMENT"]


def test_the_dockerfile_has_known_instructions_and_its_commands_a_correct_syntax() -> None:
    found = instructions()
    assert found[0][0] == "FROM"
    assert {name for name, _ in found} <= {"FROM", "ARG", "ENV", "RUN", "WORKDIR", "COPY", "CMD"}
    for name, text in found:
        if name == "RUN":
            assert subprocess.run(["sh", "-n"], input=text, text=True, check=False).returncode == 0, text
        if name == "CMD":
            assert json.loads(text)


def test_the_image_has_a_python_and_extras_that_exist() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    found = instructions()
    (version,) = re.findall(r"^python:(3\.\d+)-", dict(found)["FROM"])
    assert f"Python :: {version}\n" in config["metadata"]["classifiers"] + "\n"
    arguments = dict(text.split("=", 1) for name, text in found if name == "ARG")
    used = [arguments["EXTRAS"], *re.findall(r"EXTRAS=([\w,]+)", (FILES / "Dockerfile").read_text())]
    assert {extra for extras in used for extra in extras.split(",")} <= set(config["options.extras_require"])
    installed = " ".join(text for name, text in found if name == "RUN")
    for name in (*arguments, "openssh-server", "/src["):
        assert name in installed
    assert ("COPY", "mpistrat /src") in found


def test_the_page_has_the_build_commands_of_the_dockerfile() -> None:
    comment = " ".join(re.findall(r"^# +(.*)$", (FILES / "Dockerfile").read_text(), re.MULTILINE))
    commands = re.findall(r"docker build (?:[^`]*?) \.", re.sub(r"\s*\\\s+", " ", comment))
    assert len(commands) == 2
    for command in commands:
        assert command in re.sub(r"\s*\\\n\s*", " ", PAGE.partition("```{literalinclude}")[0])


# -- Kubernetes -------------------------------------------------------------------------------------------------------


def manifest(path: Path) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason=needs_extra)
    document, = yaml.safe_load_all(path.read_text())
    return document


each_manifest = pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)


@each_manifest
def test_a_manifest_is_an_mpijob(path: Path) -> None:
    validator = pytest.importorskip("jsonschema", reason=needs_extra).Draft202012Validator
    schema = json.loads((ROOT / "tests" / "support" / "mpijob_v2beta1.json").read_text())
    validator.check_schema(schema)
    assert [error.message for error in validator(schema).iter_errors(manifest(path))] == []
    assert list(validator(schema).iter_errors({}))


@each_manifest
def test_a_manifest_starts_a_rank_for_each_slot(path: Path) -> None:
    spec = manifest(path)["spec"]
    launcher, worker = (spec["mpiReplicaSpecs"][name] for name in ("Launcher", "Worker"))
    starts, serves = (each["template"]["spec"]["containers"][0] for each in (launcher, worker))
    assert starts["image"] == serves["image"]
    assert starts["image"] in (FILES / "Dockerfile").read_text()
    assert serves["command"] == ["/usr/sbin/sshd", "-De"]
    assert starts["command"][:2] == ["mpistrat", "run"]
    line = split_arguments(starts["command"][2:], _parser())
    ranks = worker["replicas"] * spec["slotsPerWorker"]
    if "elastic" in path.name:  # The operator writes the program.
        assert {f"--max-np={ranks}", f"--slots-per-host={spec['slotsPerWorker']}", "--elastic",
                "--host-discovery-script=/etc/mpi/discover_hosts.sh"} <= set(line.own)
    else:
        assert set(line.own) == {f"-np={ranks}", "--hostfile=/etc/mpi/hostfile"}
    directory = dict(instructions())["WORKDIR"]
    assert line.command == ("python", f"{directory}/train.py")
    limits = serves["resources"]["limits"]
    threads = dict(zip(line.mpirun[::2], line.mpirun[1::2], strict=True))["-x"].partition("TF_NUM_INTRAOP_THREADS=")[2]
    assert int(threads) * spec["slotsPerWorker"] == int(limits["cpu"])
    assert ("gpu" in path.name) == ("nvidia.com/gpu" in limits)
    assert limits.get("nvidia.com/gpu", str(spec["slotsPerWorker"])) == str(spec["slotsPerWorker"])


# -- Slurm ------------------------------------------------------------------------------------------------------------

# The options of sbatch that the scripts use, with the form of their values.
SBATCH = {"job-name": r"[\w-]+", "output": r"[\w%.-]+", "time": r"(\d+-)?\d{2}:\d{2}:\d{2}", "nodes": r"[1-9]\d*",
          "ntasks": r"[1-9]\d*", "ntasks-per-node": r"[1-9]\d*", "cpus-per-task": r"[1-9]\d*",
          "open-mode": "append", "no-kill": "", "requeue": "", "signal": r"B:TERM@\d+",
          "mem": r"\d+[KMGT]", "mem-per-cpu": r"\d+[KMGT]", "gpus-per-node": r"([a-z]\w*:)?[1-9]\d*"}
each_script = pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)


def options_of(path: Path) -> dict[str, str]:
    """The #SBATCH options of a script; each is one word, `--name=value` or `--name`."""
    lines = re.findall(r"^#SBATCH (.*)$", path.read_text(), re.MULTILINE)
    options = dict(re.fullmatch(r"--([a-z-]+)=?(\S*)", line).groups() for line in lines)  # type: ignore[union-attr]
    assert len(options) == len(lines), "an option is there twice"
    return options


@each_script
def test_a_batch_script_has_a_correct_syntax_and_options_of_sbatch(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
    for name, value in options_of(path).items():
        assert re.fullmatch(SBATCH[name], value), f"--{name}={value}"
    # sbatch takes no options after the first command, and says nothing.
    commands = [number for number, line in enumerate(lines) if line and not line.startswith("#")]
    assert max(number for number, line in enumerate(lines) if line.startswith("#SBATCH")) < commands[0]


@each_script
def test_a_batch_script_asks_for_as_many_tasks_and_gpus_as_it_has_ranks(path: Path) -> None:
    options = options_of(path)
    nodes, per_node = int(options["nodes"]), int(options["ntasks-per-node"])
    assert int(options["ntasks"]) == nodes * per_node
    assert (nodes == 1) == ("one-node" in path.name)
    assert ("gpus-per-node" in options) == ("gpu" in path.name)
    assert options.get("gpus-per-node", str(per_node)) == str(per_node)
    if "elastic" in path.name:
        assert 'mpistrat run --elastic -np "$SLURM_NTASKS"' in path.read_text()
        return
    command = shlex.split(path.read_text().splitlines()[-1])
    assert command[-2:] == ["python", "train.py"]
    if command[0] == "mpistrat":
        assert split_arguments(command[2:], _parser()).own == ("-np=$SLURM_NTASKS",)
    else:
        assert command[:3] == ["srun", "--mpi=pmix", "--cpus-per-task=$SLURM_CPUS_PER_TASK"]
