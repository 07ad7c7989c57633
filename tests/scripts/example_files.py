"""Write files for the lines of test_examples.py and test_resnet50.py: data, and examples that do not broadcast."""

from pathlib import Path

import numpy as np
import tensorflow as tf

import mpistrat
from tests.support.mnist_file import in_the_layout_of_mnist


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

mpistrat.init()
if mpistrat.rank() == 0:
    for example, broadcast in BROADCASTS.items():
        text = (EXAMPLES / f"{example}.py").read_text()
        assert broadcast in text
        Path(f"{example}_alone.py").write_text(text.replace(broadcast, "keras.callbacks.Callback()"))
    mnist = in_the_layout_of_mnist()
    np.savez("mnist.npz", **mnist)
    np.savez("few.npz", **{name: array[:0] for name, array in mnist.items()})
    np.savez("other.npz", images=np.zeros(3))
    write_colours(Path("colours"))
mpistrat.barrier()
