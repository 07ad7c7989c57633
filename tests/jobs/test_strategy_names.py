"""strategy(name) in whole programs: one script under every name, and the example of central storage."""

import re
from collections.abc import Callable

import pytest

from ..support.jobs import ROOT, needs_mpirun
from ..support.scripts import Line, Ran

SCRIPT = "tests/scripts/strategy_by_name.py"
EXAMPLE = "examples/central_storage.py"


def named(name: str, ranks: int) -> Line:
    """The script under the strategy of a name."""
    return Line(ranks, f"{SCRIPT} {name}")


ALONE = named("one_device", 1)


@pytest.mark.nightly
@pytest.mark.parametrize("needed", [(named(name, 1), ALONE) for name in ("mirrored", "central_storage", "default")],
                         ids=lambda lines: str(lines[0]))
def test_the_same_script_gives_the_same_numbers_on_one_rank(needed: tuple[Line, ...],
                                                            ran: Callable[[Line], Ran]) -> None:
    assert re.fullmatch(r"rank 0: returned \d\.\d{5} \d\.\d{5}\n", ran(needed[0]).well)
    assert ran(needed[0]).well == ran(ALONE).well


@pytest.mark.nightly
@needs_mpirun
@pytest.mark.parametrize("needed", [(named("multi_worker_mirrored", 2), ALONE), (named("central_storage", 3), ALONE)],
                         ids=lambda lines: str(lines[0]))
def test_the_same_script_gives_the_same_numbers_on_several_ranks(needed: tuple[Line, ...],
                                                                 ran: Callable[[Line], Ran]) -> None:
    expected = [float(number) for number in ran(ALONE).well.split()[3:]]
    for rank, output in enumerate(ran(needed[0]).output):
        head, *numbers = output.removeprefix(f"rank {rank}: ").split()
        assert head == "returned", output
        assert [float(number) for number in numbers] == pytest.approx(expected, abs=2e-5)


# -- parameter servers ------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@needs_mpirun
@pytest.mark.parametrize("needed", [named("parameter_server", 2)], ids=str)
def test_two_ranks_are_too_few_for_parameter_servers(needed: Line, ran: Callable[[Line], Ran]) -> None:
    for rank, output in enumerate(ran(needed).output):
        assert output == (f"rank {rank}: InvalidRequestError: a coordinator, a worker and a parameter server are 3 "
                          "ranks; there are 2 (mpirun -np 3).\n")


@pytest.mark.nightly
@needs_mpirun
@pytest.mark.parametrize("needed", [named("parameter_server chief=1 worker=2 ps=1", 2)], ids=str)
def test_jobs_that_do_not_fit_the_ranks_are_an_error_on_every_rank(needed: Line, ran: Callable[[Line], Ran]) -> None:
    for rank, output in enumerate(ran(needed).output):
        assert output.startswith(f"rank {rank}: ClusterError: ") and "need 4 ranks, but there are 2" in output


# -- the example ------------------------------------------------------------------------------------------------------


def last_lines(ran: Ran) -> tuple[list[int], float, int, str]:
    """Bytes of each rank's optimizer, the accuracy, the number of ranks and the digest of the weights."""
    found = re.search(r"^test accuracy (\d\.\d+), norm of the weights \d+\.\d+, (\d) ranks\n"
                      r"sha256 of the weights: ([0-9a-f]{64})$", ran.well, re.MULTILINE)
    assert found is not None, ran
    slots = re.findall(r"^rank \d: (\d+) bytes for the optimizer$", ran.well, re.MULTILINE)
    return [int(nbytes) for nbytes in slots], float(found[1]), int(found[2]), found[3]


@pytest.mark.nightly
@pytest.mark.parametrize("needed", [Line(1, f"{EXAMPLE} --epochs 4")], ids=str)
def test_the_example_is_short_and_runs_without_mpirun(needed: Line, ran: Callable[[Line], Ran]) -> None:
    assert len((ROOT / EXAMPLE).read_text().splitlines()) < 80
    slots, accuracy, ranks, _ = last_lines(ran(needed))
    assert accuracy > 0.8
    assert (len(slots), ranks) == (1, 1)


@pytest.mark.nightly
@needs_mpirun
@pytest.mark.parametrize("needed", [tuple(Line(3, f"{EXAMPLE} --epochs 2{more}") for more in (
    "", " --strategy mirrored"))], ids=["3"])
def test_the_example_keeps_slots_once_and_gives_the_bits_of_mirrored(needed: tuple[Line, ...],
                                                                     ran: Callable[[Line], Ran]) -> None:
    central, mirrored = (last_lines(ran(line)) for line in needed)
    assert central[3] == mirrored[3]
    assert mirrored[0] == [central[0][0]] * 3
    assert all(nbytes < 20 for nbytes in central[0][1:])
