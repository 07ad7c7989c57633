"""A variational autoencoder: layers of the script's own, a random layer, and a loss that a layer adds."""

import keras
from keras import ops
from sklearn.datasets import load_digits

import mpistrat.keras as hvd

hvd.init()
images = hvd.shard((load_digits().data / 16).astype("float32"))


class Sampling(keras.layers.Layer):
    """A random point around each mean; adds the distance from the standard normal distribution to the loss."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator()

    def call(self, inputs):
        mean, log_variance = inputs
        self.add_loss(-5e-3 * ops.mean(1 + log_variance - mean ** 2 - ops.exp(log_variance)))
        return mean + ops.exp(0.5 * log_variance) * keras.random.normal(ops.shape(mean), seed=self.seed)


class Autoencoder(keras.Model):
    """Into a few numbers, and back."""

    def __init__(self, numbers):
        super().__init__()
        self.encoder = keras.layers.Dense(32, activation="relu")
        self.mean, self.log_variance = keras.layers.Dense(numbers), keras.layers.Dense(numbers)
        self.sampling = Sampling()
        self.decoder = keras.Sequential([keras.layers.Dense(32, activation="relu"),
                                         keras.layers.Dense(64, activation="sigmoid")])

    def call(self, images):
        hidden = self.encoder(images)
        return self.decoder(self.sampling((self.mean(hidden), self.log_variance(hidden))))


model = Autoencoder(4)  # It has no weights before its first batch.
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(3e-3 * hvd.size())), loss="mse")
model.fit(images, images, batch_size=64, epochs=3, verbose=2 if hvd.rank() == 0 else 0, callbacks=[
    hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()])
