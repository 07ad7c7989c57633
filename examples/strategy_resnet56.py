"""Train ResNet-56 on images of CIFAR's shape with model.fit under MPIStrategy.

    python examples/strategy_resnet56.py
    mpirun -np 2 python examples/strategy_resnet56.py

The images are synthetic: each class has a pattern with much noise. With --data they are read from a file.
"""

import argparse

import keras
import numpy as np
from keras import layers

import mpistrat
from mpistrat.tensorflow import MPIStrategy

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=64, help="images of all ranks together in a step (default: 64)")
parser.add_argument("--images", type=int, default=2048, help="how many are made (default: 2048)")
parser.add_argument("--depth", type=int, default=56, help="layers with weights, 6 n + 2 (default: 56)")
parser.add_argument("--data", metavar="NPZ", help="a file with x_train, y_train, x_test and y_test of CIFAR-10")
args = parser.parse_args()


def load_data() -> tuple[np.ndarray, ...]:
    """Images of shape (n, 32, 32, 3) and their labels, for training and for testing; the same on every rank."""
    if args.data:
        with np.load(args.data) as file:
            return tuple(file[name] for name in ("x_train", "y_train", "x_test", "y_test"))
    random = np.random.default_rng(0)
    patterns = random.uniform(0, 255, (10, 32, 32, 3))
    y = random.integers(0, 10, args.images + 256)
    x = 0.5 * patterns[y] + random.uniform(0, 127, (len(y), 32, 32, 3))
    return x[:args.images], y[:args.images], x[args.images:], y[args.images:]


def convolution(x: keras.KerasTensor, filters: int, stride: int = 1, size: int = 3) -> keras.KerasTensor:
    x = layers.Conv2D(filters, size, stride, padding="same", use_bias=False, kernel_initializer="he_normal",
                      kernel_regularizer=keras.regularizers.L2(1e-4))(x)
    return layers.BatchNormalization(momentum=0.9)(x)


def resnet(depth: int) -> keras.Model:
    """Three stages of blocks of two convolutions (He et al., "Deep Residual Learning", 2015, section 4.2)."""
    inputs = keras.Input((32, 32, 3))
    x = layers.ReLU()(convolution(layers.Rescaling(1 / 127.5, -1)(inputs), 16))
    for filters in (16, 32, 64):
        for block in range((depth - 2) // 6):
            stride = 2 if filters > 16 and block == 0 else 1
            y = convolution(layers.ReLU()(convolution(x, filters, stride)), filters)
            short_cut = x if stride == 1 else convolution(x, filters, stride, size=1)
            x = layers.ReLU()(layers.Add()([short_cut, y]))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


keras.utils.set_random_seed(1)
strategy = MPIStrategy()
x_train, y_train, x_test, y_test = load_data()
with strategy.scope():
    model = resnet(args.depth)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                  metrics=["accuracy"])
schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate if epoch < args.epochs // 2 else 0.01)
chief = mpistrat.rank() == 0
model.fit(x_train, y_train, batch_size=args.batch_size, epochs=args.epochs, callbacks=[schedule],
          verbose=2 if chief else 0)
_, accuracy = model.evaluate(x_test, y_test, batch_size=args.batch_size, verbose=0)
if chief:
    norm = np.sqrt(sum(float((weight ** 2).sum()) for weight in model.get_weights()))
    print(f"test accuracy {accuracy:.3f}, norm of the weights {norm:.3f}, {mpistrat.size()} ranks")
