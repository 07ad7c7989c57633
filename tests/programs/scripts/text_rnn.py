"""Sentiment of short texts: a vocabulary, padded batches of a tf.data pipeline, an embedding and a recurrent layer."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import mpistrat.keras as hvd

hvd.init()
random = np.random.default_rng(3)
good, bad, other = ["good", "fine", "lovely"], ["bad", "dull", "awful"], ["film", "song", "and", "the", "a", "very"]
labels = random.integers(0, 2, 600)
texts = [" ".join([*random.choice(other, random.integers(1, 6)), str(random.choice(good if label else bad)),
                   *random.choice(other, random.integers(0, 4))]) for label in labels]

vectorize = layers.TextVectorization(max_tokens=40)
vectorize.adapt(texts)  # All texts, so that all ranks have the same vocabulary.
data = hvd.shard(tf.data.Dataset.from_tensor_slices((texts, labels)))
data = data.map(lambda text, label: (vectorize(text), label), tf.data.AUTOTUNE)
data = data.cache().shuffle(600).padded_batch(25, drop_remainder=True).prefetch(tf.data.AUTOTUNE)

model = keras.Sequential([
    layers.Embedding(vectorize.vocabulary_size(), 8, mask_zero=True),
    layers.Bidirectional(layers.LSTM(8)),
    layers.Dense(1, activation="sigmoid"),
])
model.compile(hvd.DistributedOptimizer(keras.optimizers.RMSprop(5e-3 * hvd.size(), clipnorm=1.0)),
              loss="binary_crossentropy", metrics=["accuracy"])
model.fit(data, epochs=3, verbose=2 if hvd.rank() == 0 else 0, callbacks=[
    hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()])
if hvd.rank() == 0:
    print(model.predict(vectorize(["a very good film", "the awful song"]), verbose=0).ravel().round(2))
