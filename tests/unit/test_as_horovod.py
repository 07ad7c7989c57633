"""Programs that import horovod and that nobody edits: --as-horovod, and nothing without it."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mpistrat import horovod
from mpistrat.cli import as_horovod
from mpistrat.cli.main import main
from mpistrat.core.settings import take_horovods, taken_from_horovod
from mpistrat.process import error_text
from mpistrat.process.launch_env import RUN_KERAS_2

PLACE = Path(horovod.__file__).parent / "path"
PROGRAM = """
import importlib, importlib.metadata, json, os
import horovod, horovod.tensorflow as hvd, horovod.tensorflow.keras, horovod.keras.callbacks
import horovod.tensorflow.elastic
import mpistrat.keras, mpistrat.tensorflow
from horovod import run
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet
from horovod.common.util import check_extension, gpu_available
from horovod.runner import run as run_of_runner
from horovod.tensorflow.functions import broadcast_object
from horovod.tensorflow.mpi_ops import Sum
everything = {}
exec("from horovod.tensorflow import *", everything)
hvd.init()
hvd.shutdown()

def why(path):
    try:
        importlib.import_module(path)
    except ImportError as error:
        return str(error)

print(json.dumps({
    "versions": [horovod.__version__, importlib.metadata.version("horovod")], "file": horovod.__file__,
    "same": [hvd.allreduce is mpistrat.tensorflow.allreduce, Sum is mpistrat.Sum, ProcessSet is mpistrat.ProcessSet,
             horovod.keras.callbacks.MetricAverageCallback is mpistrat.keras.callbacks.MetricAverageCallback,
             run is mpistrat.run, run_of_runner is mpistrat.run, HorovodInternalError is mpistrat.CollectiveError,
             everything["DistributedGradientTape"] is mpistrat.tensorflow.DistributedGradientTape,
             hvd.elastic.run is mpistrat.tensorflow.elastic.run],
    "missing": {name: why("horovod." + name) for name in ("torch", "spark.keras", "ray", "mxnet", "nothing")},
    "has_torch": hasattr(horovod, "torch"), "left": sorted(name for name in os.environ if "HOROVOD_" in name),
    "own": mpistrat.__name__, "threshold": os.environ["MPISTRAT_FUSION_THRESHOLD"]}))
"""


def run_program(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], env={**os.environ, **environment}, text=True,
                          capture_output=True, timeout=200, check=False)


def test_what_a_program_finds_by_the_names_of_horovod() -> None:
    done = run_program(PROGRAM, PYTHONPATH=as_horovod.variables("", os.environ)["PYTHONPATH"],
                       HOROVOD_FUSION_THRESHOLD="1000", HOROVOD_THREAD_AFFINITY="1")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["versions"] == ["0.28.1", "0.28.1"]
    assert Path(found["file"]).is_relative_to(PLACE)
    assert all(found["same"]), found["same"]
    missing = found["missing"]
    assert "PyTorch" in missing["torch"] and "Spark" in missing["spark.keras"] and "Ray" in missing["ray"]
    assert missing["torch"].startswith("No module named 'horovod.torch': ")
    assert missing["mxnet"] and missing["nothing"] == "No module named 'horovod.nothing'"
    assert not found["has_torch"]
    assert (found["left"], found["threshold"]) == (["HOROVOD_THREAD_AFFINITY"], "1000")
    assert done.stderr.count("HOROVOD_THREAD_AFFINITY is not read and has no counterpart.") == 1


@pytest.mark.parametrize("keras_2", [False, True])
def test_errors_of_old_words_name_the_option_unless_it_is_given(keras_2: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(error_text, "ADVICE", dict(error_text.ADVICE))
    monkeypatch.delenv(RUN_KERAS_2, raising=False)
    if keras_2:
        monkeypatch.setenv(RUN_KERAS_2, "1")
    horovod.install_horovod("horovod")
    errors = [TypeError("'list' object is not callable"), ValueError("Argument(s) not recognized: {'lr': 0.1}"),
              TypeError("Trainer.compile() got an unexpected keyword argument 'experimental_run_tf_function'.")]
    for error in errors:
        assert ("mpistrat run --as-horovod=keras2" in error_text.describe(error, None).message) is not keras_2
    # There is a reason for what Horovod has and mpistrat has not.
    missing = error_text.describe(ModuleNotFoundError("No module named 'horovod.torch': there is no ..."), None).message
    assert "import mpistrat.keras" not in missing


def test_without_the_flag_there_is_no_horovod() -> None:
    code = "import importlib.util, mpistrat; print(importlib.util.find_spec('horovod'))"
    assert run_program(code).stdout == "None\n"


def test_variables_of_horovod_become_settings_where_there_is_one_that_takes_the_value() -> None:
    environ = {"HOROVOD_FUSION_THRESHOLD": "5", "HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_HOME": "/x",
               "HOROVOD_CACHE_CAPACITY": "7", "MPISTRAT_CACHE_CAPACITY": "8"}
    assert taken_from_horovod(environ) == {"MPISTRAT_FUSION_THRESHOLD": "5", "MPISTRAT_CACHE_CAPACITY": "8"}
    take_horovods(environ)
    assert environ == {"MPISTRAT_FUSION_THRESHOLD": "5", "MPISTRAT_CACHE_CAPACITY": "8",
                       "HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_HOME": "/x"}


def test_the_path_comes_first_and_once() -> None:
    once = as_horovod.variables("", {"PYTHONPATH": "/a"})["PYTHONPATH"]
    assert once == f"{PLACE}{os.pathsep}/a"
    assert as_horovod.variables("", {"PYTHONPATH": once})["PYTHONPATH"] == once
    assert as_horovod.variables(None, {}) == {}


def test_the_lines_for_a_shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "info")
    monkeypatch.setenv("PYTHONPATH", "/with a blank")
    assert main(["as-horovod", "--env=keras2"]) == 0
    lines, said = capsys.readouterr()
    shown = subprocess.run(["sh", "-c", lines + "command -v horovodrun; env"], env={"PATH": "/usr/bin:/bin"}, text=True,
                           capture_output=True, timeout=20, check=True).stdout.splitlines()
    assert shown[0] == str(PLACE / "bin" / "horovodrun")
    assert f"PYTHONPATH={PLACE}{os.pathsep}/with a blank" in shown
    assert "_MPISTRAT_KERAS_2=1" in shown and "MPISTRAT_LOG_LEVEL=info" in shown
    assert said.startswith("mpistrat as-horovod: `import horovod` finds mpistrat ")
    assert main(["as-horovod"]) == 2


def test_horovodrun_is_mpistrat_run(tmp_path: Path) -> None:
    stand_in = tmp_path / "mpistrat"
    stand_in.write_text('#!/bin/sh\necho "$@"\n')
    stand_in.chmod(0o755)
    done = subprocess.run([PLACE / "bin" / "horovodrun", "-np", "2", "dp", "--tf"], text=True, capture_output=True,
                          env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, timeout=20, check=True)
    assert done.stdout == "run --as-horovod -np 2 dp --tf\n"


def test_a_real_horovod_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "is not used" not in as_horovod.first_line()
    metadata = tmp_path / "horovod-0.27.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.27.0\n")
    monkeypatch.setattr(sys, "path", [str(PLACE), *sys.path, str(tmp_path)])
    assert as_horovod.first_line().endswith(f" Horovod 0.27.0 is installed too, in {tmp_path}, and is not used.")


def test_the_command_of_a_job_has_it(capsys: pytest.CaptureFixture[str], tmp_path: Path,
                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 5.0.0'\n")
    mpirun.chmod(0o755)
    words = ["run", "--dry-run", "--mpirun", str(mpirun), "-np", "2", "--as-horovod", "sh"]
    assert main(words) == 0
    line, said = capsys.readouterr()
    assert f"PYTHONPATH={shlex.quote(str(PLACE))} " in line and "-x PYTHONPATH" in line
    assert said.startswith("mpistrat run: `import horovod` finds mpistrat ")
    assert main([word for word in words if word != "--as-horovod"]) == 0
    line, said = capsys.readouterr()
    assert "PYTHONPATH" not in line and "Horovod" not in said
    assert main(["run", "--as-horovod=tf1", "-np", "2", "sh"]) == 2


def test_functions_of_its_util() -> None:
    assert horovod.split_list(list(range(7)), 3) == [[0, 1, 2], [3, 4], [5, 6]]
    assert horovod.split_list([1], 2) == [[1]]
    assert [n for n in range(9) if horovod.num_rank_is_power_2(n)] == [1, 2, 4, 8]


@pytest.mark.nightly
def test_three_words_of_keras_2() -> None:
    program = """
import horovod.tensorflow as hvd
import keras
import numpy as np
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
hvd.init()
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(lr=0.25))
model.compile(optimizer, "mse", experimental_run_tf_function=False)
model.fit(np.zeros((4, 2)), np.zeros((4, 1)), verbose=0)
print(float(optimizer.learning_rate), len(optimizer.variables()) == len(optimizer.variables))
"""
    path = as_horovod.variables("keras2", os.environ)
    done = run_program(program, **path)
    assert done.stdout.splitlines() == ["0.25 True"], done.stderr
    done = run_program(program, PYTHONPATH=path["PYTHONPATH"])
    assert done.returncode and "lr" in done.stderr
