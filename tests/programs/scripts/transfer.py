"""Transfer learning: a new head on a frozen network with BatchNormalization, then all of it with a small rate."""

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import mpistrat.keras as hvd

hvd.init()
images, digits = load_digits(return_X_y=True)
images = (images / 16).reshape(-1, 8, 8, 1).astype("float32")
odd = digits % 2
train_rows = hvd.shard(images[:1440], odd[:1440])


def convolutions():
    return keras.Sequential([
        keras.Input((8, 8, 1)),
        layers.Conv2D(8, 3, use_bias=False), layers.BatchNormalization(), layers.ReLU(),
        layers.Conv2D(16, 3, use_bias=False), layers.BatchNormalization(), layers.ReLU(),
    ], name="convolutions")


if hvd.rank() == 0:  # What a download would bring: the weights of a network that has learned something else.
    old = keras.Sequential([convolutions(), layers.GlobalAveragePooling2D(), layers.Dense(10, "softmax")])
    old.compile("adam", "sparse_categorical_crossentropy")
    old.fit(images, digits, batch_size=128, epochs=1, verbose=0)
    old.layers[0].save_weights("pretrained.weights.h5")

base = convolutions()
if hvd.rank() == 0:  # Other ranks get them by the broadcast.
    base.load_weights("pretrained.weights.h5")
base.trainable = False
image = keras.Input((8, 8, 1))
x = layers.GlobalAveragePooling2D()(base(image, training=False))
model = keras.Model(image, layers.Dense(2)(layers.Dropout(0.1)(x)))


def train(rate, epochs):
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(rate * hvd.size())),
                  keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    model.fit(*train_rows, batch_size=48, epochs=epochs, verbose=2 if hvd.rank() == 0 else 0, callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()])


before = np.array(base.get_weights()[0])
train(1e-2, 2)
base.trainable = True  # Its BatchNormalization too: Keras 3 passes on fit's training=True, in place of the one above.
train(1e-4, 1)
if hvd.rank() == 0:
    print(f"the base has changed by {np.abs(base.get_weights()[0] - before).max():.5f}")
