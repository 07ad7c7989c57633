import keras
from sklearn.datasets import load_digits

import mpistrat.keras as hvd

hvd.init()
x, y = load_digits(return_X_y=True)
x, y = x[:1793] / 16, y[:1793]
x, y = x[hvd.rank()::2], y[hvd.rank()::2]  # 897 rows on rank 0, 896 on rank 1

model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10, "softmax")])
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam()), "sparse_categorical_crossentropy")
model.fit(x, y, epochs=5, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
