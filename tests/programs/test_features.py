"""What each feature of a strategy does with MPIStrategy on two ranks is what it does in one process."""

from collections.abc import Callable

import pytest

from ..support.jobs import needs_mpirun
from ..support.scripts import Line, Ran
from . import table
from .conftest import check
from .table import Program


@needs_mpirun
@pytest.mark.parametrize("program", table.FEATURES, ids=str)
def test_features_work(program: Program, ran: Callable[[Line], Ran]) -> None:
    check(program, ran)
