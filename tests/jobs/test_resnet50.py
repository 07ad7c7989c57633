"""examples/resnet50.py on tiny images: made-up ones, and files in ImageNet's layout."""

import re
from collections.abc import Callable

import pytest

from ..support.jobs import needs_mpirun
from ..support.scripts import Line, Ran

pytestmark = needs_mpirun

QUICK = ("--image-size 32 --batch-size 2 --epochs 2 --warmup-epochs 2 --steps-per-epoch 2 --validation-steps 1 "
         "--classes 3")
LAST_LINE = re.compile(r"^training loss (\d+\.\d+), validation accuracy \d\.\d+, learning rate (\d\.\d+), (\d) ranks$",
                       re.MULTILINE)


def resnet50(ranks: int, arguments: str) -> Line:
    return Line(ranks, f"examples/resnet50.py {QUICK} {arguments}")


def files(ranks: int) -> tuple[Line, ...]:
    """Two files for training and two for validation, and the example that reads them."""
    return Line(ranks, "tests/scripts/example_files.py"), resnet50(ranks, "--data colours")


def last_line(ran: Ran) -> re.Match[str]:
    [found] = LAST_LINE.finditer(ran.well)
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("needed", [
    resnet50(2, "--synthetic --mixed-precision bfloat16 --learning-rate 0.64")], ids=["bfloat16"])
def test_made_up_images_in_mixed_precision_reach_the_rate_of_the_warm_up(needed: Line,
                                                                         ran: Callable[[Line], Ran]) -> None:
    line = last_line(ran(needed))
    assert float(line[2]) == pytest.approx(0.64 * 4 / 256, abs=1e-5)
    assert int(line[3]) == 2


@pytest.mark.nightly
@pytest.mark.parametrize("needed", [files(2)], ids=["2"])
def test_each_rank_trains_on_files_of_its_own(needed: tuple[Line, ...], ran: Callable[[Line], Ran]) -> None:
    assert int(last_line(ran(needed[-1]))[3]) == 2


@pytest.mark.nightly
@pytest.mark.parametrize("needed", [files(3)], ids=["3"])
def test_fewer_files_than_ranks_are_an_error(needed: tuple[Line, ...], ran: Callable[[Line], Ran]) -> None:
    for error in ran(needed[-1]).error:
        assert "colours has 2 files train-*, which are too few for 3 ranks" in error
