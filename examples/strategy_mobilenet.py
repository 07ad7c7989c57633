"""Train a small MobileNetV2 with model.fit under MPIStrategy: the ranks of one host take MirroredStrategy's place.

    python examples/strategy_mobilenet.py
    mpirun -np 2 python examples/strategy_mobilenet.py

With GPUs, start one rank for each. The images are scikit-learn's digits, enlarged to 16 x 16 pixels.
"""

import argparse
import sys

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import mpistrat
from mpistrat.tensorflow import MPIStrategy

try:
    from sklearn.datasets import load_digits
except ImportError:
    sys.exit("The digits come with scikit-learn, which is not installed: pip install scikit-learn")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (default: 32)")
args = parser.parse_args()


def inverted_residual(x: keras.KerasTensor, filters: int, stride: int) -> keras.KerasTensor:
    """Widen, filter each channel, and narrow: the bottleneck of MobileNetV2, with a short cut where shapes allow it."""
    y = layers.Conv2D(4 * x.shape[-1], 1, use_bias=False)(x)
    y = layers.ReLU(6.0)(layers.BatchNormalization(momentum=0.9)(y))
    y = layers.DepthwiseConv2D(3, stride, padding="same", use_bias=False)(y)
    y = layers.ReLU(6.0)(layers.BatchNormalization(momentum=0.9)(y))
    y = layers.BatchNormalization(momentum=0.9)(layers.Conv2D(filters, 1, use_bias=False)(y))
    return layers.Add()([x, y]) if x.shape == y.shape else y


def small_mobilenet(classes: int) -> keras.Model:
    inputs = keras.Input((16, 16, 1))
    x = layers.Conv2D(16, 3, padding="same", use_bias=False)(inputs)
    x = layers.ReLU(6.0)(layers.BatchNormalization(momentum=0.9)(x))
    for filters, stride in [(16, 1), (24, 2), (24, 1), (32, 2), (32, 1)]:
        x = inverted_residual(x, filters, stride)
    return keras.Model(inputs, layers.Dense(classes)(layers.GlobalAveragePooling2D()(x)))


keras.utils.set_random_seed(1)
strategy = MPIStrategy()
x, y = load_digits(return_X_y=True)
x = np.repeat(np.repeat(x.reshape(-1, 8, 8, 1).astype("float32") / 16, 2, axis=1), 2, axis=2)
batch_size = args.batch_size * strategy.num_replicas_in_sync
train = tf.data.Dataset.from_tensor_slices((x[:1437], y[:1437])).cache().shuffle(1437).batch(batch_size)
test = tf.data.Dataset.from_tensor_slices((x[1437:], y[1437:])).batch(batch_size)

with strategy.scope():
    model = small_mobilenet(10)
    model.compile(keras.optimizers.Adam(3e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                  metrics=["accuracy"])

chief = mpistrat.rank() == 0
model.fit(train, epochs=args.epochs, verbose=2 if chief else 0)
_, accuracy = model.evaluate(test, verbose=0)
if chief:
    norm = np.sqrt(sum(float((weight ** 2).sum()) for weight in model.get_weights()))
    print(f"test accuracy {accuracy:.3f}, norm of the weights {norm:.3f}, {mpistrat.size()} ranks")
