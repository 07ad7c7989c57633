"""Marks for what only some versions of Keras have. Import it after `pytest.importorskip("keras")`."""

import keras
import pytest

needs_multi_optimizer = pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"),
                                           reason="this Keras has no MultiOptimizer")
