"""Every feature of tests/features with MPIStrategy, which the table of tests/features/README.md is made of."""

import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("keras")

from mpistrat.tensorflow import MPIStrategy

from ..features import FEATURES, Feature, World


@pytest.mark.parametrize("feature", FEATURES.values(), ids=lambda feature: feature.name)
def test_works(feature: Feature, rank: int, shared_dir: str) -> None:
    feature.program(World(MPIStrategy(), rank, shared_dir))
