"""The Python blocks of the pages run on every rank, each with the names that its page takes for granted.

tests/programs/test_first_hour.py runs those of the README and docs/transcript.md.
"""

import glob
import re
import signal
import textwrap
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from sklearn import datasets

import mpistrat
import mpistrat.keras
import mpistrat.tensorflow

DOCS = Path(__file__).parents[2] / "docs"
ELSEWHERE = {"scale.md", "transcript.md"}

BUILD = """
def build_and_compile_model():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model
x, y = np.ones((64, 4), np.float32), np.ones((64, 1), np.float32)
dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(32)
"""
MODEL = BUILD + """
model = build_and_compile_model()
optimizer = keras.optimizers.SGD(0.01)
optimizer.build(model.trainable_variables)
def train_step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
"""
# Page and first line: what stands before, and what must hold after. None: it cannot run here.
SNIPPETS: dict[tuple[str, str], tuple[str, str] | None] = {
    ("elastic.md", "model.fit(data, epochs=90,"): None,  # `...` stands for other callbacks
    ("elastic.md", "@hvd.elastic.run"): (MODEL + "step = train_step\ndef batches_of(sampler, size):\n"
                                         "    yield list(sampler)[:size]", "len(x) == 64"),
    ("gpu.md", "import mpistrat.tensorflow as hvd"): ("", "hvd.is_initialized()"),
    ("horovod.md", "import mpistrat.keras as hvd "): ("", "hvd.DistributedOptimizer"),
    ("horovod.md", "import mpistrat"): ("", "train(3) == (mpistrat.rank(), mpistrat.size())"),
    ("horovod.md", "import mpistrat.tensorflow as hvd  # `join`"): (
        MODEL + "import mpistrat.tensorflow as hvd\noptimizer = hvd.DistributedOptimizer(optimizer)\n"
        "batches = [(x, y)] * (1 + hvd.rank())", "last == hvd.size() - 1"),
    ("horovod.md", 'optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(), uneven="join")'): ("", "optimizer"),
    ("horovod.md", "service = tf.data.experimental.service"): ("host = '127.0.0.1'", "address.startswith('grpc')"),
    ("horovod.md", "z = encoder(images, training=True)"): (
        "import mpistrat.tensorflow as hvd\nencoder, images = keras.layers.Dense(2), np.ones((3, 4), np.float32)\n",
        "everybody.shape == (3 * hvd.size(), 2)"),
    ("running.md", "def fit_and_save(model, data, path):"): (
        "saved = []\nclass model:\n    save = saved.append\n    def fit(data, epochs):\n"
        "        raise KeyboardInterrupt",
        "interrupted(lambda: fit_and_save(model, None, 'a.keras')) and saved == ['a.keras']"),
    ("running.md", "import signal"): ("", "not agreed() and (stop.append(15) or agreed())"),
    ("running.md", "import os"): ("", "int(rank) == mpistrat.rank()"),
    ("running.md", "import mpistrat.keras as hvd"): (
        "x, n = np.ones(9), mpistrat.size()",
        "[len(own) for own in prepare(x, x, [*'abc'])] == [9 // n, 9 // n, -(-3 // n)]"),
    ("slow-networks.md", "import keras"): ("", "hvd.is_initialized()"),
    ("slow-networks.md", "optimizer = hvd.DistributedOptimizer(optimizer, comp"): (MODEL, "optimizer"),
    ("slow-networks.md", "model.compile(keras.optimizers.SGD(0.1, momentum"): (MODEL, "model"),
    ("slow-networks.md", "local = hvd.callbacks.LocalSGD(every=10, scope="): (MODEL, "model"),
    ("slow-networks.md", "model.compile(keras.optimizers.AdamW(4e-4)"): (MODEL, "model"),
    ("slow-networks.md", "local = hvd.callbacks.DiLoCo(every=50)"): (MODEL, "same(model.weights)"),
    ("slow-networks.md", "model = hvd.load_model("): (
        MODEL + "if hvd.rank() == 0:\n    model.save('model.keras')\nhvd.barrier()", "model.optimizer"),
    ("strategies.md", "import mpistrat.tensorflow"): (BUILD, "same(model.weights)"),
    ("strategies.md", "strategy = mpistrat.tensorflow.MPIStrategy(compression="): ("", "strategy"),
}


def snippets() -> list[tuple[str, str]]:
    """(page, code) of each block."""
    return [(page.name, textwrap.dedent(code)) for page in sorted(DOCS.glob("*.md")) if page.name not in ELSEWHERE
            for _, code in re.findall(r"^( *)```python\n(.*?)^\1```$", page.read_text(), re.DOTALL | re.MULTILINE)]


def key_of(page: str, code: str) -> tuple[str, str]:
    found = [key for key in SNIPPETS if key[0] == page and code.startswith(key[1])]
    assert found, f"docs/{page}: no entry for {code}"
    return max(found, key=lambda key: len(key[1]))


def test_each_snippet_has_an_entry() -> None:
    assert {key_of(page, code) for page, code in snippets()} == set(SNIPPETS)


def same(weights: list[Any]) -> bool:
    mine = [np.asarray(weight).tobytes() for weight in weights]
    return all(other == mine for other in mpistrat.allgather_object(mine))


def interrupted(function: Any) -> bool:
    with pytest.raises(KeyboardInterrupt):
        function()
    return True


@pytest.mark.parametrize(("page", "code"), snippets(), ids=lambda text: text.splitlines()[0][:40])
def test_a_snippet_runs(page: str, code: str, shared_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = SNIPPETS[key_of(page, code)]
    if entry is None:
        pytest.skip("an excerpt")
    monkeypatch.chdir(shared_dir)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    names: dict[str, Any] = {
        "keras": keras, "tf": tf, "np": np, "hvd": mpistrat.keras, "mpistrat": mpistrat, "same": same,
        "interrupted": interrupted, "__name__": "snippet"}
    handler = signal.getsignal(signal.SIGTERM)
    try:
        for text in (entry[0], code):
            exec(compile(text, f"docs/{page}", "exec"), names)
        assert eval(entry[1], names)
    finally:
        signal.signal(signal.SIGTERM, handler)
    mpistrat.barrier()


# -- docs/scale.md: the scripts of both ways, and after each the code of the page's other sections ---------------------


PAGE = (DOCS / "scale.md").read_text()
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
