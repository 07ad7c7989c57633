"""A small transformer in mixed precision: do low words outnumber high words in a text?"""

import keras
import numpy as np
from keras import layers

import mpistrat.keras as hvd

WORDS, LENGTH, WIDTH = 50, 12, 16

hvd.init()
keras.mixed_precision.set_global_policy("mixed_float16")

random = np.random.default_rng(hvd.rank())  # Each rank makes its own texts.
texts = random.integers(1, WORDS, (256, LENGTH))
labels = (texts < WORDS // 2).mean(axis=1) > 0.5


class Embedding(layers.Layer):
    """The embedding of each word plus that of its position."""

    def __init__(self):
        super().__init__()
        self.words, self.positions = layers.Embedding(WORDS, WIDTH), layers.Embedding(LENGTH, WIDTH)

    def call(self, text):
        return self.words(text) + self.positions(keras.ops.arange(LENGTH))


class Block(layers.Layer):
    """Attention and a feed-forward network, each with a shortcut."""

    def __init__(self):
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, WIDTH // 2, dropout=0.1)
        self.network = keras.Sequential([layers.Dense(2 * WIDTH, "gelu"), layers.Dense(WIDTH)])
        self.norms = [layers.LayerNormalization(), layers.LayerNormalization()]

    def call(self, x, training=False):
        x = self.norms[0](x + self.attention(x, x, training=training))
        return self.norms[1](x + self.network(x))


text = keras.Input((LENGTH,), dtype="int32")
x = layers.GlobalAveragePooling1D()(Block()(Block()(Embedding()(text))))
model = keras.Model(text, layers.Dense(1, activation="sigmoid", dtype="float32")(x))
optimizer = hvd.DistributedOptimizer(keras.optimizers.AdamW(3e-3), compression=hvd.Compression.fp16)
model.compile(optimizer, loss="binary_crossentropy", metrics=["accuracy"])
model.fit(texts, labels, batch_size=32, epochs=2, verbose=2 if hvd.rank() == 0 else 0, callbacks=[
    hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()])
