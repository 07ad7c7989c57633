"""Write files for other programs: data, and scripts whose ranks go apart."""

from pathlib import Path

import numpy as np
import tensorflow as tf

import mpistrat


def in_the_layout_of_mnist() -> dict[str, np.ndarray]:
    """The digit says where an image is bright; half the test labels lie."""
    random = np.random.default_rng(3)
    labels = np.arange(240, dtype=np.uint8) % 10
    images = random.integers(0, 50, (len(labels), 28, 28), dtype=np.uint8)
    for image, label in zip(images, labels):
        row, column = divmod(int(label), 4)
        image[9 * row:9 * row + 7, 7 * column:7 * column + 7] += 200
    y_test = labels[200:].copy()
    y_test[::2] = (y_test[::2] + 1) % 10
    return {"x_train": images[:200], "y_train": labels[:200], "x_test": images[200:], "y_test": y_test}


def write_colours(directory: Path) -> None:
    """Two files for training and two for validation, each with three noisy images of one of three colours."""
    directory.mkdir()
    random = np.random.default_rng(0)
    for name in [f"{split}-{number:05}-of-00002" for split in ("train", "validation") for number in range(2)]:
        with tf.io.TFRecordWriter(str(directory / name)) as writer:
            for label in (1, 2, 3):
                image = random.integers(0, 60, (48, 40, 3), dtype=np.uint8)
                image[..., label - 1] += 150
                features = {
                    "image/encoded": tf.train.Feature(bytes_list=tf.train.BytesList(
                        value=[tf.io.encode_jpeg(image).numpy()])),
                    "image/class/label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label]))}
                writer.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())


# What makes the ranks' weights equal in each example; any other callback or call can stand in its place.
BROADCASTS = {
    "keras_digits": "hvd.callbacks.BroadcastGlobalVariablesCallback(0)",
    "custom_loop_digits": "hvd.broadcast_variables(model.weights + optimizer.variables, root_rank=0)",
}
EXAMPLES = Path(__file__).parents[2] / "examples"
APART = """
import mpistrat.tensorflow as hvd
import tensorflow as tf

hvd.init()
same, other = tf.Variable(1.0), [tf.Variable(float(hvd.rank()))]
print("I am rank", hvd.rank())
"""

mpistrat.init()
if mpistrat.rank() == 0:
    for example, broadcast in BROADCASTS.items():
        text = (EXAMPLES / f"{example}.py").read_text()
        assert broadcast in text
        Path(f"{example}_alone.py").write_text(text.replace(broadcast, "keras.callbacks.Callback()"))
    Path("apart.py").write_text(APART)
    mnist = in_the_layout_of_mnist()
    np.savez("mnist.npz", **mnist)
    np.savez("few.npz", **{name: array[:0] for name, array in mnist.items()})
    np.savez("other.npz", images=np.zeros(3))
    write_colours(Path("colours"))
    Path("few").mkdir()
    Path("few/train-00000-of-00001").touch()
mpistrat.barrier()
