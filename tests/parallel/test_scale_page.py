"""docs/scale.md: the scripts of both ways, and after each the code of the page's other sections, run on every rank."""

import glob
import re
from pathlib import Path

import numpy as np
import pytest

import mpistrat

keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")
datasets = pytest.importorskip("sklearn.datasets")

PAGE = (Path(__file__).parents[2] / "docs" / "scale.md").read_text()
ROWS, TEST_ROWS, FILES = 240, 30, 6


def code_after(mark: str) -> list[str]:
    """The code blocks that stand below `<!-- mark -->`."""
    return re.findall(rf"^<!-- {mark} -->\n```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def changed(diff: str) -> tuple[str, str]:
    """The script before and after the changes of a diff that has all lines."""
    lines = diff.splitlines()
    return tuple("\n".join(line[1:] for line in lines if line[:1] != sign) + "\n" for sign in "+-")  # type: ignore[return-value]


def digits(return_X_y: bool) -> tuple[np.ndarray, np.ndarray]:  # noqa: N803
    """As sklearn.datasets.load_digits, with fewer rows."""
    random = np.random.default_rng(3)
    return random.uniform(0, 16, (ROWS, 64)), random.integers(0, 10, ROWS)


def parse(record: object) -> tuple:
    row = tf.io.parse_single_example(record, {"x": tf.io.FixedLenFeature([64], tf.float32),
                                              "y": tf.io.FixedLenFeature([], tf.int64)})
    return row["x"], row["y"]


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["strategy", "horovod"])
def test_the_code_of_the_page_runs(way: str, shared_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (script,), (diff,), blocks = code_after("before"), code_after(way), code_after(f"run {way}")
    before, after = changed(diff)
    assert before == script
    assert len(blocks) >= 5
    monkeypatch.chdir(shared_dir)
    monkeypatch.setattr(datasets, "load_digits", digits)
    x, y = digits(return_X_y=True)
    if mpistrat.rank() == 0:
        for number in range(FILES):
            with tf.io.TFRecordWriter(f"part-{number}.tfrecord") as file:
                for row in range(number, ROWS, FILES):
                    features = {"x": tf.train.Feature(float_list=tf.train.FloatList(value=x[row])),
                                "y": tf.train.Feature(int64_list=tf.train.Int64List(value=[y[row]]))}
                    file.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())
    mpistrat.barrier()
    names = {"tf": tf, "np": np, "glob": glob, "parse": parse, "x_test": x[:TEST_ROWS], "y_test": y[:TEST_ROWS]}
    for code in (after, *blocks):
        exec(compile(code, f"docs/scale.md ({way})", "exec"), names)
    weights = names["model"].get_weights()  # type: ignore[attr-defined]
    for other in mpistrat.allgather_object([weight.tobytes() for weight in weights]):
        assert other == [weight.tobytes() for weight in weights]
    assert Path("digits.keras").exists()
    assert 0 <= names["accuracy"] <= 1  # type: ignore[operator]
    assert len(set(mpistrat.allgather_object(names["accuracy"]))) == 1
