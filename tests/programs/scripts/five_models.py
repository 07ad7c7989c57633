"""A search over five models in one process: all ranks train each of them, and choose the same."""

import keras
import numpy as np

import mpistrat.keras as hvd

hvd.init()
random = np.random.default_rng(0)  # The same rows on all ranks, of which each takes its part.
x = random.normal(size=(600, 3)).astype("float32")
y = np.sin(x).sum(axis=1)
x_train, y_train = hvd.shard(x[:480], y[:480])


def train(width, optimizer):
    """A model and its loss on the rows that none was trained on."""
    keras.utils.clear_session(free_memory=False)
    model = keras.Sequential([keras.layers.Dense(width, "tanh"), keras.layers.Dense(1)])  # Built by the first batch.
    model.compile(hvd.DistributedOptimizer(optimizer), loss="mse")
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    history = model.fit(x_train, y_train, batch_size=20, epochs=2, validation_data=(x[480:], y[480:]), verbose=0,
                        callbacks=callbacks)
    return model, history.history["val_loss"][-1]


choices = {
    "narrow": (4, keras.optimizers.SGD(0.05)),
    "wide": (64, keras.optimizers.SGD(0.05)),
    "adam": (16, keras.optimizers.Adam(0.01)),
    "lion": (16, keras.optimizers.Lion(0.01)),
    "rmsprop": (16, keras.optimizers.RMSprop(0.01)),
}
models, losses = {}, {}
for name, choice in choices.items():
    models[name], losses[name] = train(*choice)
best = min(losses, key=losses.get)
if len(set(hvd.allgather_object(best))) > 1:
    raise SystemExit(f"The ranks have chosen different models: {losses}")
if hvd.rank() == 0:
    print(f"{best} is best of {losses}")
