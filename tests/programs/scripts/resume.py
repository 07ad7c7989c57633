"""Three epochs of training per job: each job goes on where the one before has ended. Only the chief has the file."""

import os

import keras
import numpy as np

import mpistrat.keras as hvd

PATH, EPOCHS = "moons.keras", 3

hvd.init()
chief = hvd.rank() == 0
random = np.random.default_rng(100 + hvd.rank())
angle, label = random.uniform(0, np.pi, 480), random.integers(0, 2, 480)
x = np.stack([np.cos(angle) * (1 - 2 * label) + label, (np.sin(angle) - 0.25) * (1 - 2 * label)], axis=1)
x += random.normal(0, 0.1, x.shape)

if chief and os.path.exists(PATH):
    model = hvd.load_model(PATH)
else:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Nadam(0.01 * hvd.size())),
                  keras.losses.BinaryCrossentropy(from_logits=True), metrics=["accuracy"])
steps = int(model.optimizer.iterations) if chief else 0
done = hvd.broadcast_object(steps // (480 // 32), root_rank=0)

callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
if chief:
    callbacks.append(keras.callbacks.ModelCheckpoint(PATH))
model.fit(x, label, batch_size=32, initial_epoch=done, epochs=done + EPOCHS, callbacks=callbacks,
          verbose=2 if chief else 0)
