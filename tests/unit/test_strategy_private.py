"""MPIStrategy alone: what it imports of TensorFlow and Keras is there, and a lone rank trains as without it."""

import importlib

import pytest

import mpistrat

tf = pytest.importorskip("tensorflow")


def test_tensorflow_has_the_private_names() -> None:
    private = importlib.import_module("mpistrat.tensorflow.distribute._tf_private")
    assert all(hasattr(private, name) for name in private.__all__)


def test_keras_has_what_is_patched_and_gets_it_back() -> None:
    pytest.importorskip("keras")
    patches = importlib.import_module("mpistrat.keras._strategy_patches")
    patches.undo()  # a test before may have made a strategy
    originals = [getattr(patch.owner, patch.name) for patch in patches.PATCHES]
    patches.apply()
    patches.apply()
    assert all(getattr(patch.owner, patch.name) is not original for patch, original in zip(patches.PATCHES, originals))
    patches.undo()
    assert [getattr(patch.owner, patch.name) for patch in patches.PATCHES] == originals
    assert all(patch.reason for patch in patches.PATCHES)


def test_a_version_of_keras_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    keras = pytest.importorskip("keras")
    patches = importlib.import_module("mpistrat.keras._strategy_patches")
    patches.undo()
    monkeypatch.setattr(keras, "__version__", "3.9.2")
    with pytest.raises(mpistrat.MissingDependencyError, match=r"needs Keras 3\.10 or later, and this is 3\.9\.2 \(pip"):
        patches.apply()
