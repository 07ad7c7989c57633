"""The same training with every backend comes to the same bits, on all ranks; a part of tests/differential."""

from collections.abc import Iterator

import pytest

import mpistrat

tf = pytest.importorskip("tensorflow")
pytest.importorskip("keras")

from ..differential.check import assert_same_in_all_legs  # noqa: E402
from ..differential.programs import PROGRAMS  # noqa: E402

# To compile takes longer than to train.
WITH_XLA = ("a small network like ResNet", "a transformer", "strategy loop")


@pytest.fixture(autouse=True)
def _initialised_afterwards() -> Iterator[None]:
    yield
    mpistrat.init()


@pytest.mark.parametrize("name", [name for name, program in PROGRAMS.items() if program.is_quick])
def test_a_program_comes_to_the_same_bits(name: str) -> None:
    assert_same_in_all_legs(name, with_xla=name in WITH_XLA)


@pytest.mark.parametrize("seed", [3])
def test_a_random_model_comes_to_the_same_bits(seed: int) -> None:
    assert_same_in_all_legs(f"seed {seed}")
