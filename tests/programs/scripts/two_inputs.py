"""A functional model with named inputs, a shared layer and two outputs: prices and quick sales of houses."""

import keras
import numpy as np
from keras import layers

import mpistrat.keras as hvd

hvd.init()
random = np.random.default_rng(2)
size, age = random.uniform(30, 200, 1200), random.uniform(0, 80, 1200)
district, neighbour = random.integers(0, 12, (2, 1200))
price = (size * (3 + district % 4 + 0.3 * (neighbour % 4)) - 2 * age) / 300
inputs = {"numbers": np.stack([size, age], axis=1).astype("float32"),
          "district": district[:, None], "neighbour": neighbour[:, None]}
targets = {"price": price, "quick": price + random.normal(0, 0.3, 1200) < 1.2}

numbers = keras.Input((2,), name="numbers")
places = [keras.Input((1,), name=name, dtype="int32") for name in ("district", "neighbour")]
normalization = layers.Normalization()
normalization.adapt(inputs["numbers"])  # With all rows, on every rank.
embedding = layers.Embedding(12, 3)  # Of both places.
together = layers.Concatenate()([normalization(numbers), *(layers.Flatten()(embedding(place)) for place in places)])
hidden = layers.Dense(16, activation="relu")(together)
outputs = {"price": layers.Dense(1, name="price")(hidden),
           "quick": layers.Dense(1, activation="sigmoid", name="quick")(hidden)}
model = keras.Model({"numbers": numbers, "district": places[0], "neighbour": places[1]}, outputs)

inputs, targets = hvd.shard(inputs, targets)
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), sparse_as_dense=True),
              loss={"price": "huber", "quick": "binary_crossentropy"}, loss_weights={"price": 1.0, "quick": 0.3},
              metrics={"price": ["mae"], "quick": ["accuracy"]})
model.fit(inputs, targets, batch_size=32, epochs=2, validation_split=0.2, verbose=2 if hvd.rank() == 0 else 0,
          callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()])
