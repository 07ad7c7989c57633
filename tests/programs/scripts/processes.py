"""Images that processes of their own prepare: a PyDataset with workers."""

import keras
import numpy as np

import mpistrat.keras as hvd

BATCH, STEPS, SIZE = 16, 6, 12


class Shapes(keras.utils.PyDataset):
    """Batches of noisy bars; the label says whether the bar is upright. Made in worker processes."""

    def __init__(self, rank, **arguments):
        super().__init__(**arguments)
        self.rank, self.epoch = rank, 0

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        random = np.random.default_rng((self.rank, self.epoch, index))
        images = random.normal(0, 0.2, (BATCH, SIZE, SIZE, 1)).astype("float32")
        labels = random.integers(0, 2, BATCH)
        for image, label in zip(images, labels):
            where = random.integers(SIZE)
            image[(slice(None), where) if label else where] += 1
        return images, labels

    def on_epoch_end(self):
        self.epoch += 1


if __name__ == "__main__":
    hvd.init()
    model = keras.Sequential([
        keras.Input((SIZE, SIZE, 1)),
        keras.layers.Conv2D(4, 3, activation="relu"),
        keras.layers.GlobalMaxPooling2D(),
        keras.layers.Dense(2),
    ])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01 * hvd.size())),
                  keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    model.fit(Shapes(hvd.rank(), workers=2, use_multiprocessing=True, max_queue_size=4), epochs=3,
              verbose=2 if hvd.rank() == 0 else 0, callbacks=[
                  hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()])
