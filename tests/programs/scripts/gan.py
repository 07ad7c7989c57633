"""A generative adversarial network with two optimizers in a train_step of its own: points on a ring."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import mpistrat.keras as hvd

NOISE = 4

hvd.init()
angles = np.random.default_rng(hvd.rank()).uniform(0, 2 * np.pi, 512)
points = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype("float32")


class GAN(keras.Model):
    """Trains a generator and a discriminator against each other."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([keras.Input((NOISE,)), layers.Dense(16),
                                           layers.BatchNormalization(), layers.LeakyReLU(), layers.Dense(2)])
        self.discriminator = keras.Sequential([keras.Input((2,)), layers.Dense(16), layers.LeakyReLU(),
                                               layers.Dropout(0.2), layers.Dense(1)])
        self.seeds = keras.random.SeedGenerator()
        self.losses_seen = [keras.metrics.Mean("discriminator_loss"), keras.metrics.Mean("generator_loss")]
        self.built = True

    def compile(self, discriminator_optimizer, generator_optimizer, loss):
        super().compile()
        self.discriminator_optimizer, self.generator_optimizer = discriminator_optimizer, generator_optimizer
        self.loss_of = loss

    @property
    def metrics(self):
        return self.losses_seen

    def train_step(self, real):
        rows = tf.shape(real)[0]
        noise = keras.random.normal((rows, NOISE), seed=self.seeds)
        with tf.GradientTape() as tape:
            judged = self.discriminator(tf.concat([self.generator(noise, training=True), real], axis=0), training=True)
            truth = tf.concat([tf.zeros((rows, 1)), tf.ones((rows, 1))], axis=0)
            discriminator_loss = self.loss_of(truth, judged)
        weights = self.discriminator.trainable_weights
        self.discriminator_optimizer.apply_gradients(zip(tape.gradient(discriminator_loss, weights), weights))
        with tf.GradientTape() as tape:
            generator_loss = self.loss_of(tf.ones((rows, 1)), self.discriminator(self.generator(noise, training=True)))
        weights = self.generator.trainable_weights
        self.generator_optimizer.apply_gradients(zip(tape.gradient(generator_loss, weights), weights))
        for metric, loss in zip(self.losses_seen, (discriminator_loss, generator_loss)):
            metric.update_state(loss)
        return {metric.name: metric.result() for metric in self.losses_seen}


model = GAN()
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3, beta_1=0.5)),
              hvd.DistributedOptimizer(keras.optimizers.Adam(2e-3, beta_1=0.5)),
              keras.losses.BinaryCrossentropy(from_logits=True))
model.fit(points, batch_size=64, epochs=3, verbose=2 if hvd.rank() == 0 else 0, callbacks=[
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    keras.callbacks.EarlyStopping("generator_loss", mode="min", patience=1)])
