"""TensorFlow's own strategies on each rank, and iterators that are alive when Python ends: each rank prints `done`."""

import keras
import numpy as np
import tensorflow as tf

import mpistrat.tensorflow as hvd

hvd.init()
rows = np.random.default_rng(0).normal(size=(240, 16)).astype("float32")
sums = rows.sum(1, keepdims=True)
for strategy in (tf.distribute.OneDeviceStrategy("/cpu:0"), tf.distribute.MirroredStrategy(["/cpu:0"])):
    with strategy.scope():
        model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    for _ in range(3):
        model.fit(tf.data.Dataset.from_tensor_slices((rows, sums)).batch(24), epochs=2, validation_data=(rows, sums),
                  verbose=0)
alive = [iter(strategy.experimental_distribute_dataset(tf.data.Dataset.range(96).batch(4))),
         iter(tf.data.Dataset.from_generator(lambda: iter(range(9)), output_signature=tf.TensorSpec((), tf.int64)))]
for iterator in alive:
    next(iterator)
print("done", flush=True)
