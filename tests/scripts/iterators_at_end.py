"""Iterators of TensorFlow's own strategies on each rank, and some that are alive when Python ends: each prints `done`.

Not by fit of Keras: its iterators of these strategies crash TensorFlow 2.21 now and then without mpistrat, too.
"""

import tensorflow as tf

import mpistrat.tensorflow as hvd

hvd.init()
for strategy in (tf.distribute.OneDeviceStrategy("/cpu:0"), tf.distribute.MirroredStrategy(["/cpu:0"])):
    for length in range(1, 40):
        iterator = iter(strategy.experimental_distribute_dataset(tf.data.Dataset.range(96).batch(4)))
        for _ in range(length % 24):
            next(iterator)
generated = tf.data.Dataset.from_generator(lambda: iter(range(9)), output_signature=tf.TensorSpec((), tf.int64))
alive = [iterator, iter(generated)]
for iterator in alive:
    next(iterator)
print("done", flush=True)
