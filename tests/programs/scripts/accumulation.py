"""Large batches by gradient accumulation, with an average of the weights (EMA) that validation uses."""

import keras
import numpy as np
from sklearn.datasets import load_digits

import mpistrat.keras as hvd

hvd.init()
x, y = load_digits(return_X_y=True)
x = (x / 16).astype("float32")
x_train, y_train = hvd.shard(x[:1536], y[:1536])

model = keras.Sequential([
    keras.Input((64,)),
    keras.layers.GaussianNoise(0.1),
    keras.layers.Dense(48, activation="swish"),
    keras.layers.Dense(10),
])
rate = keras.optimizers.schedules.ExponentialDecay(4e-3 * hvd.size(), decay_steps=20, decay_rate=0.8)
optimizer = keras.optimizers.AdamW(rate, weight_decay=1e-3, global_clipnorm=1.0, use_ema=True, ema_momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=4, average_aggregated_gradients=True)
model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
history = model.fit(x_train, y_train, batch_size=16, epochs=4, validation_data=(x[1536:], y[1536:]),
                    verbose=2 if hvd.rank() == 0 else 0, callbacks=[
                        hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback(),
                        keras.callbacks.SwapEMAWeights(swap_on_epoch=True)])
if hvd.rank() == 0:
    print(f"best accuracy {np.max(history.history['val_accuracy']):.3f}, updates {int(optimizer.iterations)}")
