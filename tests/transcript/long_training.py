import os

import keras
from sklearn.datasets import load_digits

import mpistrat.keras as hvd

hvd.init()
print(f"rank {hvd.rank()} is process {os.getpid()}", flush=True)
x, y = hvd.shard(*load_digits(return_X_y=True))

model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10, "softmax")])
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam()), "sparse_categorical_crossentropy")
model.fit(x / 16, y, epochs=100_000, verbose=2 if hvd.rank() == 0 else 0,
          callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
