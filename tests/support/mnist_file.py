"""Data in the layout of Keras' mnist.npz."""

import numpy as np


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
