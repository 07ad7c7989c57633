"""The table of docs/horovod.md with what Keras 3 asks of an old script: both lines of each row are run."""

import contextlib
import itertools
import re
import warnings
from pathlib import Path
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
    """The rows of the table; of the last column the first code."""
    table = PAGE[PAGE.index("<!-- keras3 -->"):PAGE.index("<!-- /keras3 -->")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()
             if line.startswith("| `")]
    return [Row(old.strip("`"), outcome, "" if new.startswith("nothing") else re.findall(r"`([^`]+)`", new)[0])
            for old, outcome, new in cells]


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """The names that the lines use."""
    import mpistrat.keras as hvd
    hvd.init()
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
        else:
            exec(row.old, script)
    if "ignored" in row.outcome:
        assert any("decay" in str(each.message) for each in caught)
    if "no effect" in row.outcome:
        assert rate_of(script["optimizer"]) == 0.5
    exec(row.new, script)
    if row.new == "optimizer.learning_rate = 0.01":
        assert rate_of(script["optimizer"]) == np.float32(0.01)


def test_the_table_has_rows_for_what_horovods_examples_use() -> None:
    old = " ".join(row.old for row in rows())
    for word in ("experimental_run_tf_function", "variables()", "ConfigProto", "set_session", "lr=", "fit_generator",
                 ".h5", ".ref()", "legacy"):
        assert word in old
