"""Digits with every kind of callback that a long training has: Horovod's, Keras' and the script's own."""

import time

import keras
import numpy as np
from sklearn.datasets import load_digits

import mpistrat.keras as hvd

hvd.init()
chief = hvd.rank() == 0

x, y = load_digits(return_X_y=True)
x = (x / 16).astype("float32")
x_train, y_train = hvd.shard(x[:1400], y[:1400])
x_valid, y_valid = x[1400:], y[1400:]


class TimeLimit(keras.callbacks.Callback):
    """Stops all ranks after the same epoch, when the slowest has spent its time."""

    def on_train_begin(self, logs=None):
        self.began = time.monotonic()

    def on_epoch_end(self, epoch, logs=None):
        if float(hvd.allreduce(time.monotonic() - self.began, name="spent", op=hvd.Max)) > 600:
            self.model.stop_training = True


model = keras.Sequential([
    keras.Input((64,)),
    keras.layers.Dense(32, activation="relu"),
    keras.layers.Dropout(0.2),
    keras.layers.Dense(10, activation="softmax"),
])
rate = 0.05 * hvd.size()
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9)), "sparse_categorical_crossentropy",
              metrics=["accuracy"])
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=2, verbose=1),
    keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.3, patience=1, min_delta=0.02),
    keras.callbacks.EarlyStopping("val_loss", patience=2, min_delta=0.02, restore_best_weights=True),
    keras.callbacks.TerminateOnNaN(),
    keras.callbacks.BackupAndRestore(f"backup-{hvd.rank()}"),
    TimeLimit(),
]
if chief:
    callbacks += [
        keras.callbacks.ModelCheckpoint("best.keras", monitor="val_loss", save_best_only=True),
        keras.callbacks.CSVLogger("history.csv"),
        keras.callbacks.TensorBoard("logs", profile_batch=0),
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: print(f"{epoch}: {logs['val_accuracy']:.3f}")),
    ]
history = model.fit(x_train, y_train, batch_size=64, epochs=12, validation_data=(x_valid, y_valid),
                    callbacks=callbacks, verbose=0)
if chief:
    best = keras.models.load_model("best.keras")
    print("best", best.evaluate(x_valid, y_valid, verbose=0), "after", np.argmin(history.history["val_loss"]) + 1)
