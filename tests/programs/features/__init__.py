"""Small programs, one for each feature of a tf.distribute.Strategy, that run with any strategy.

The table of programs runs them with MPIStrategy; `python -m tests.programs.features` also with TensorFlow's own
strategies, and prints what each of them can do.
"""

from . import (  # noqa: F401  (importing them registers their features)
    input,
    keras_callbacks,
    keras_data,
    keras_files,
    keras_layers,
    keras_models,
    keras_optimizers,
    keras_steps,
    loops,
    replica,
    variables,
)
from .common import FEATURES, Feature, World

__all__ = ["FEATURES", "Feature", "World"]
