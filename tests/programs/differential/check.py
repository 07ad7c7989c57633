"""One program in all legs, and the comparisons."""

import os

import mpi4py.MPI

from .compare import assert_equal_in_both, assert_equal_on_all_ranks, assert_near_in_both
from .legs import COMPILED, COMPILED_MPI, DEFAULT, MPI, OTHER_DOOR, SHARDED, legs_for, under
from .programs import PROGRAMS
from .training import train

# How far the losses, and the sum of all updates of the weights, may be from those without XLA, relative to their norms.
# A gradient that is 0 but for rounding, as that of a bias before a normalization, moves its weight as far as any other
# in Adam and its kind. In bfloat16 a dozen layers under RMSprop have moved by 0.8 of it.
ROUNDING = {"float64": (1e-6, 1e-3), "float32": (1e-3, 0.1), "mixed_float16": (0.01, 0.2),
            "mixed_bfloat16": (0.1, 0.95)}
ONE_THREAD = {"TF_NUM_INTEROP_THREADS": "1"}  # in the environment, with which TensorFlow repeats every program


def assert_same_in_all_legs(name: str, with_xla: bool = True) -> None:
    """Train the program of that name in each leg, with_xla in those of XLA too. Collective.

    mpistrat is not initialised afterwards.

    The legs are not compared for a program that TensorFlow itself does not repeat; with one inter-op thread it does.
    The other door comes to the same weights and state of the optimizer on 2, 4, 8 ... ranks, where it is exact to
    divide each rank's loss, and near them on others. With a sharded optimizer the bits are the same, unless norms or
    accumulated gradients are summed. XLA computes the step in another order than TensorFlow. So its
    legs are compared bit by bit with each other, and with TensorFlow's within rounding.

    Raises:
        AssertionError: On all ranks, when any of them has other bits than the others, or in one leg than in another.
    """
    recipe = PROGRAMS[name]
    size = mpi4py.MPI.COMM_WORLD.Get_size()
    legs = legs_for(size, with_xla and recipe.can_be_compiled, recipe.has_other_door, recipe.can_be_sharded)
    trained = {}
    for leg in legs:
        with under(leg):
            trained[leg] = train(recipe.compiled() if leg.is_compiled else recipe.sharded() if leg.is_sharded else
                                 recipe.by_other_door() if leg.is_other_door else recipe)
        assert_equal_on_all_ranks(trained[leg].shared, f"{name}, leg {leg.name!r}")
    if COMPILED in trained and trained[COMPILED].is_near:
        assert_near_in_both(trained[MPI].course, trained[COMPILED].course,
                            dict(zip(("losses", "moved"), ROUNDING[recipe.policy], strict=True)),
                            f"{name}, legs {MPI.name!r} and {COMPILED.name!r}")
    is_exact = size & (size - 1) == 0 and not recipe.rounds_by_door
    if OTHER_DOOR in trained and not is_exact and trained[DEFAULT].is_near:
        assert_near_in_both(trained[DEFAULT].course, trained[OTHER_DOOR].course,
                            {"moved": ROUNDING[recipe.policy][1]}, f"{name}, both doors")
    if SHARDED in trained and trained[DEFAULT].is_near:
        assert_near_in_both(trained[DEFAULT].course, trained[SHARDED].course,
                            dict(zip(("losses", "moved"), ROUNDING[recipe.policy], strict=True)),
                            f"{name}, legs {DEFAULT.name!r} and {SHARDED.name!r}")
    if not recipe.is_repeatable and not ONE_THREAD.items() <= os.environ.items():
        return
    if OTHER_DOOR in trained and is_exact:
        assert_equal_in_both(trained[DEFAULT].shared, trained[OTHER_DOOR].shared, f"{name}, both doors")
    if SHARDED in trained and recipe.is_same_when_sharded:
        assert_equal_in_both(trained[DEFAULT].shared, trained[SHARDED].shared, f"{name}, sharded and not")
    for leg in legs:
        if leg.is_other_door or leg.is_sharded:
            continue
        by_mpi = COMPILED_MPI if leg.is_compiled else MPI
        if leg is not by_mpi and leg.sums_like_mpi(size, recipe.sends_halves):
            for part in ("shared", "own"):
                assert_equal_in_both(getattr(trained[by_mpi], part), getattr(trained[leg], part),
                                     f"{name}, legs {by_mpi.name!r} and {leg.name!r}")
