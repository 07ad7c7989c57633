"""The data of the tutorials, which download MNIST: scikit-learn's digits, in the layout of Keras' data sets."""

import numpy as np
from sklearn.datasets import load_digits


def load_data() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """(images, labels) for training and for testing: uint8 of shape (n, 8, 8) from 0 to 255, and int64."""
    x, y = load_digits(return_X_y=True)
    x = (x.reshape(-1, 8, 8) * 255 / 16).astype(np.uint8)
    order = np.random.default_rng(0).permutation(len(x))
    train, test = order[:1400], order[1400:]
    return (x[train], y[train]), (x[test], y[test])
