"""Old Keras: the table of docs/horovod.md, of which both lines of each row are run, and the optimizers of Keras 2."""

import contextlib
import importlib
import itertools
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

import mpistrat

keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")

PAGE = (Path(__file__).parent.parent.parent / "docs" / "horovod.md").read_text()


class Row(NamedTuple):
    """A row of the table: the old line, what becomes of it, the line to write ("" for none)."""

    old: str
    outcome: str
    new: str


def rows() -> list[Row]:
    table = PAGE[PAGE.index("<!-- keras3 -->"):PAGE.index("<!-- /keras3 -->")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()
             if line.startswith("| `")]
    return [Row(old.strip("`"), outcome, "" if new.startswith("nothing") else re.findall(r"`([^`]+)`", new)[0])
            for old, outcome, new in cells]


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    import mpistrat.keras as hvd
    hvd.init()
    hvd.DistributedOptimizer(keras.optimizers.SGD(0.5))  # From then on fit and compile know mpistrat.
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.5)
    model.compile(optimizer, "mse")
    x = np.zeros((4, 2), np.float32)
    data = tf.data.Dataset.from_tensor_slices((x, x[:, 0])).batch(2)
    model.fit(data, verbose=0)
    batches = ((x, x[:, 0]) for _ in itertools.count())
    return {"K": keras.backend, "keras": keras, "tf": tf, "mpistrat": mpistrat, "hvd": hvd, "model": model,
            "optimizer": optimizer, "data": data, "batches": batches, "labels": [0, 1],
            "pairs": [(tf.zeros(v.shape), v) for v in model.trainable_variables]}


@pytest.fixture
def script(names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names for one row, whose lines write to a directory of their own."""
    monkeypatch.chdir(tmp_path)
    names["optimizer"].learning_rate = 0.5
    return dict(names)


def rate_of(optimizer: Any) -> float:
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))


@pytest.mark.horovod("optimizer-variables")
@pytest.mark.parametrize("row", rows(), ids=lambda row: row.old)
def test_the_old_line_does_what_the_table_says_and_the_new_one_works(row: Row, script: dict[str, Any]) -> None:
    error = re.match(r"(\w+Error)", row.outcome)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if error and "by the version" in row.outcome:
            with contextlib.suppress(ValueError):
                exec(row.old, script)
        elif error:
            with pytest.raises(Exception) as raised:
                exec(row.old, script)
            assert type(raised.value).__name__ == error[1]
            if "says this" in row.outcome:
                assert " is an argument of Keras 2. Leave it out" in str(raised.value)
        else:
            exec(row.old, script)
    if "ignored" in row.outcome:
        assert any("decay" in str(each.message) for each in caught)
    if "no effect" in row.outcome:
        assert rate_of(script["optimizer"]) == 0.5
    exec(row.new, script)
    if row.new == "optimizer.learning_rate = 0.01":
        assert rate_of(script["optimizer"]) == np.float32(0.01)


# -- optimizers of Keras 2 and of TensorFlow 1 ------------------------------------------------------------------------

@pytest.mark.horovod("optimizer-old")
@pytest.mark.parametrize("door", ["mpistrat.tensorflow", "mpistrat.keras"])
def test_an_optimizer_of_keras_2_is_distributed_beside_keras_3(door: str) -> None:
    """Also where tf.keras is Keras 3."""
    tf_keras = pytest.importorskip("tf_keras")
    hvd = importlib.import_module(door)
    for module in (tf_keras.optimizers, tf_keras.optimizers.legacy):
        optimizer = hvd.DistributedOptimizer(module.Adam(0.5), name="mine")
        assert optimizer.is_distributed and type(optimizer).__name__ == "Adam"
        assert optimizer.get_config()["name"] == "mine"
    with pytest.raises(ValueError, match=r"takes optimizers of tf_keras.optimizers and of "
                                         r"tf_keras.optimizers.legacy. Received one of the class SGD"):
        hvd.DistributedOptimizer(importlib.import_module("tf_keras.src.optimizers.optimizer_v1").SGD())


@pytest.mark.horovod("optimizer-old")
def test_an_optimizer_of_tensorflow_1_is_refused_with_what_to_write() -> None:
    import mpistrat.keras as hvd
    with pytest.raises(ValueError, match=r"AdamOptimizer object at .*, which is an optimizer of TensorFlow 1: take one "
                                         r"of keras\.optimizers for a Keras model, or average the gradients with "):
        hvd.DistributedOptimizer(tf.compat.v1.train.AdamOptimizer(0.1))


@pytest.mark.horovod("optimizer-old")
def test_an_optimizer_of_tensorflow_1_works_with_the_tape() -> None:
    import mpistrat.tensorflow as hvd
    hvd.init()
    variable = tf.Variable([2.0])
    with tf.GradientTape() as tape:
        loss = variable * 3.0
    gradients = hvd.DistributedGradientTape(tape).gradient(loss, [variable])
    tf.compat.v1.train.GradientDescentOptimizer(0.5).apply_gradients(zip(gradients, [variable]))
    assert variable.numpy().tolist() == [0.5]


IN_A_PROCESS = """
import os, sys, keras, tensorflow as tf, mpistrat.tensorflow.keras as hvd
hvd.init()
hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
print("tf_keras" in sys.modules, hvd.SyncBatchNormalization.__module__)
print(hvd.DistributedOptimizer(tf.keras.optimizers.Adam()).__module__.partition(".")[0])
"""


@pytest.mark.nightly
@pytest.mark.horovod("optimizer-old")
@pytest.mark.parametrize("variable, printed", [
    ("0", "False mpistrat.keras.sync_batch_norm keras"), ("1", "True mpistrat.keras.keras2 tf_keras")])
def test_keras_2_is_imported_where_tf_keras_says_so(variable: str, printed: str) -> None:
    pytest.importorskip("tf_keras")
    done = subprocess.run([sys.executable, "-c", IN_A_PROCESS], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "TF_USE_LEGACY_KERAS": variable})
    assert done.stdout.split() == printed.split(), done.stderr


def test_the_counter_of_steps_of_the_first_keras_3_has_another_name() -> None:
    steps_of = importlib.import_module("mpistrat.tensorflow.kerases").steps_of
    first = SimpleNamespace(iterations=object())
    assert steps_of(first) is first.iterations
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=2)
    assert steps_of(optimizer) is optimizer._iterations
