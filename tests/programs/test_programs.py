"""Each program of the table does what its row says. A job for each number of ranks runs them one after the other."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ..support.jobs import ROOT, needs_mpirun, run_job, run_limited
from ..support.levels import sample
from ..support.scripts import Line, Ran
from . import table
from .conftest import check
from .table import Program

HERE = Path(__file__).parent
DIGEST_OF_CHECKPOINT = """
import hashlib, keras, sys
for path in sys.argv[1:]:
    weights = keras.models.load_model(path).get_weights()
    assert "mpistrat" not in sys.modules
    print(hashlib.sha256(b"".join(weight.tobytes() for weight in weights)).hexdigest())
"""
# A session is typed on every rank; what it shows goes to a file of the rank's own.
TYPED = 'file="$1/rank${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}}" && shift && exec "$@" < "$0" > "$file" 2>&1'

pytestmark = needs_mpirun


@pytest.mark.parametrize("program", table.ALL, ids=str)
def test_a_program_does_what_its_row_says(program: Program, ran: Callable[[Line], Ran]) -> None:
    check(program, ran)


@pytest.mark.horovod("optimizer-class")
@pytest.mark.parametrize("needed", [table.DIGITS], ids=["both"])
def test_only_the_chief_writes_a_checkpoint_which_loads_without_mpistrat_with_the_weights_of_the_last_line(
        needed: tuple[Line, ...], ran: Callable[[Line], Ran]) -> None:
    paths = [[ran(line).directory / line.words.split()[-1].format(rank=rank) for rank in range(2)] for line in needed]
    assert [[path.exists() for path in of_ranks] for of_ranks in paths] == [[True, False]] * 2
    loading = run_limited([sys.executable, "-c", DIGEST_OF_CHECKPOINT, *(str(chiefs) for chiefs, _ in paths)])
    assert loading.code == 0, loading.output
    assert loading.output.splitlines()[-2:] == [
        re.findall(r"weights (\w+), the same", ran(line).well)[0] for line in needed]


@pytest.mark.horovod("data-service")
@pytest.mark.parametrize("program", [table.DATA_SERVICE], ids=str)
def test_ranks_prepare_input_for_each_other(program: Program, ran: Callable[[Line], Ran]) -> None:
    check(program, ran)


@pytest.mark.parametrize("needed", [table.BENCHMARK], ids=str)
def test_the_benchmark_prints_what_each_rank_and_all_together_do(needed: Line, ran: Callable[[Line], Ran]) -> None:
    output = ran(needed).well
    assert len(re.findall(r"^measurement \d: \d+\.\d images/s on this rank$", output, re.MULTILINE)) == 2, output
    [each], [total] = (re.findall(rf"^(\d+\.\d) \+- \d+\.\d images/s {what}$", output, re.MULTILINE)
                       for what in ("per rank", "in total on 2 ranks"))
    assert float(total) == pytest.approx(2 * float(each), abs=0.12)


@pytest.mark.parametrize("needed", [table.OPERATIONS], ids=["both"])
def test_adasum_is_not_the_average(needed: tuple[Program, ...], ran: Callable[[Line], Ran]) -> None:
    adasum, average = (re.findall(r"weights (\w+),", ran(line).well) for line in needed)
    assert len(adasum) == len(average) == 1 and adasum != average


# How a script gets its data is a feature, which features/input.py and keras_data.py compare with one process.
@pytest.mark.parametrize("needed", [*table.AS_ONE[:2], pytest.param(table.AS_ONE[2], marks=pytest.mark.nightly)],
                         ids=lambda lines: str(lines[0]))
def test_an_example_trains_as_one_process_does(needed: tuple[Program, ...], ran: Callable[[Line], Ran]) -> None:
    [accuracy, norm], [accuracy_of_one, norm_of_one] = (check(line, ran) for line in needed)
    assert norm == pytest.approx(norm_of_one, abs=0.01)
    assert accuracy == pytest.approx(accuracy_of_one, abs=0.006)


@sample("needed", table.TRAINED, ids=["2", "3"])
def test_all_ranks_have_the_same_bits_and_one_process_almost(needed: tuple[Program, ...],
                                                             ran: Callable[[Line], Ran]) -> None:
    def results(line: Program) -> list[dict[str, np.ndarray]]:
        check(line, ran)
        return [dict(np.load(ran(line).directory / f"trained.{line.ranks}.{rank}.npz")) for rank in range(line.ranks)]
    [expected] = results(needed[0])
    for line in needed[1:]:
        first, *others = results(line)
        for name, value in first.items():
            for other in others:
                np.testing.assert_array_equal(other[name], value, err_msg=f"{name}, {line.ranks} ranks")
            np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-5 if "weights" in name else 1e-6,
                                       err_msg=f"{name}, {line.ranks} ranks")


@pytest.mark.parametrize("needed", [*table.NAMED[:-1], pytest.param(table.NAMED[-1], marks=pytest.mark.nightly)],
                         ids=lambda lines: str(lines[0]))
def test_the_same_script_gives_the_same_numbers_under_the_strategy_of_each_name(
        needed: tuple[Program, ...], ran: Callable[[Line], Ran]) -> None:
    numbers, expected = (check(line, ran) for line in needed)
    assert numbers == pytest.approx(expected * needed[0].ranks, abs=2e-5 if needed[0].ranks > 1 else 0)


@sample("needed", table.CENTRAL, ids=["2", "3"])
def test_central_storage_keeps_slots_once_and_gives_the_bits_of_mirrored(needed: tuple[Program, ...],
                                                                         ran: Callable[[Line], Ran]) -> None:
    central, mirrored = (ran(line).well for line in needed)
    [digest], [other] = (re.findall(r"^sha256 of the weights: (\w{64})$", said, re.MULTILINE)
                         for said in (central, mirrored))
    assert digest == other
    slots, everywhere = ([int(nbytes) for nbytes in re.findall(r"^rank \d: (\d+) bytes for", said, re.MULTILINE)]
                         for said in (central, mirrored))
    assert everywhere == [slots[0]] * needed[0].ranks
    assert all(nbytes < 20 for nbytes in slots[1:])


@pytest.mark.parametrize("needed", [Line(2, "apart.py")], ids=str)
def test_ranks_that_go_apart_would_be_seen(needed: Line, ran: Callable[[Line], Ran]) -> None:
    assert ran(needed).equal[0] == "same 1, other 1: unequal: ['other']"
    assert ran(needed).output[1] == "I am rank 1\n"


def test_all_scripts_and_examples_are_run() -> None:
    run = (HERE / "table.py").read_text() + "".join(path.read_text() for path in ROOT.glob("tests/jobs/test_*.py"))
    parts = [path for path in HERE.glob("features/*.py") if "@feature(" in path.read_text()]
    paths = (*parts, *HERE.glob("scripts/*.py"), *HERE.glob("tutorials/*_*.py"), *ROOT.glob("examples/*.py"))
    assert [path for path in paths if path.stem.removesuffix("_digits") not in run] == []


@pytest.mark.parametrize("path", [*ROOT.glob("examples/strategy_*.py"), ROOT / "examples" / "central_storage.py"],
                         ids=lambda path: path.stem)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 80


def test_interactive_python_goes_on_after_errors(tmp_path: Path) -> None:
    run_job(2, ["sh", "-c", TYPED, str(HERE / "scripts" / "interactive.txt"), tmp_path, "python", "-i"]).well()
    for rank in range(2):
        output = (tmp_path / f"rank{rank}").read_text()
        assert "AttributeError: 'Sequential' object has no attribute 'fti'" in output, output
        assert f"rank {rank} of 2 sees 1 model" in output, output
