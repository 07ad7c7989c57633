"""A loop in Horovod's elastic form: it goes on when ranks or hosts are lost, and trains each row once in an epoch.

    mpistrat run --elastic -np 4 python examples/elastic_loop.py
    mpistrat run --elastic --min-np 2 --max-np 8 --host-discovery-script ./hosts.sh python examples/elastic_loop.py

While it runs, end a rank: `kill -9` with one of the process numbers that it prints.
"""

import argparse
import os
import sys

import keras
import tensorflow as tf

import mpistrat.tensorflow as hvd

try:
    from sklearn.datasets import load_digits
except ImportError:
    sys.exit("The digits come with scikit-learn, which is not installed: pip install scikit-learn")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=16, help="images of each rank in a step (default: 16)")
args = parser.parse_args()

hvd.init()
print(f"rank {hvd.rank()} of {hvd.size()} is process {os.getpid()}", flush=True)
x, y = load_digits(return_X_y=True)
x = x.astype("float32") / 16
train, test = slice(1437), slice(1437, None)
model = keras.Sequential([keras.Input(x.shape[1:]), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)])
optimizer = keras.optimizers.Adam(1e-3)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@tf.function
def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Train on a batch."""
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(images, training=True))
    gradients = hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    return loss


@hvd.elastic.run
def training(state: hvd.elastic.TensorFlowKerasState) -> None:
    """Train what is left. It is called again after a loss, with the state of the last commit."""
    while state.epoch < args.epochs:
        rows = list(state.sampler)
        for start in range(0, len(rows), args.batch_size):
            batch = rows[start:start + args.batch_size]
            state.loss = float(step(x[batch], y[batch]))
            state.sampler.record_indices(batch)
            state.commit()
        if hvd.rank() == 0:
            print(f"epoch {state.epoch}: loss {state.loss:.3f} of {hvd.size()} ranks", flush=True)
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commit()


training(hvd.elastic.TensorFlowKerasState(model, optimizer, epoch=0, loss=0.0,
                                          sampler=hvd.elastic.ElasticSampler(x[train])))
accuracy = keras.ops.mean(keras.ops.argmax(model(x[test]), axis=1) == y[test])
if hvd.rank() == 0:
    print(f"test accuracy {float(accuracy):.3f}, {hvd.size()} ranks at the end")
