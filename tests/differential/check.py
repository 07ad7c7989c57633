"""One program in all legs, and the comparisons."""

import os

import mpi4py.MPI

from .compare import assert_equal_in_both, assert_equal_on_all_ranks
from .legs import MPI, legs_for, under
from .programs import PROGRAMS
from .random_models import random_recipe
from .training import Recipe, train

SEED = "seed "
ONE_THREAD = {"TF_NUM_INTEROP_THREADS": "1"}  # in the environment, with which TensorFlow repeats every program


def recipe_named(name: str) -> Recipe:
    """The program of that name, or `seed N` for a random one."""
    return random_recipe(int(name.removeprefix(SEED))) if name.startswith(SEED) else PROGRAMS[name].recipe


def assert_same_in_all_legs(name: str) -> None:
    """Train the program of that name in each leg. Collective; mpistrat is not initialised afterwards.

    The legs are not compared for a program that TensorFlow itself does not repeat; with one inter-op thread it does.

    Raises:
        AssertionError: On all ranks, when any of them has other bits than the others, or in one leg than in another.
    """
    recipe = recipe_named(name)
    size = mpi4py.MPI.COMM_WORLD.Get_size()
    legs, trained = legs_for(size), {}
    for leg in legs:
        with under(leg):
            trained[leg.name] = train(recipe)
        assert_equal_on_all_ranks(trained[leg.name].shared, f"{name}, leg {leg.name!r}")
    if not recipe.is_repeatable and not ONE_THREAD.items() <= os.environ.items():
        return
    for leg in legs:
        if leg is not MPI and leg.sums_like_mpi(size, recipe.sends_halves):
            for part in ("shared", "own"):
                assert_equal_in_both(getattr(trained[MPI.name], part), getattr(trained[leg.name], part),
                                     f"{name}, legs {MPI.name!r} and {leg.name!r}")
