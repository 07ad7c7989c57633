import keras
from sklearn.datasets import load_digits

import mpistrat.keras as hvd

hvd.init()
x, y = hvd.shard(*load_digits(return_X_y=True))  # this rank's rows; all ranks have the same number

model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3 * hvd.size()))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer, loss, metrics=["accuracy"])
model.fit(x / 16, y, epochs=5, verbose=2 if hvd.rank() == 0 else 0, callbacks=[
    hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()])
