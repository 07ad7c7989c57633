"""TensorFlow's tutorial "Custom training with tf.distribute.Strategy", and its other ways to go through a dataset.

The tutorial makes tf.distribute.MirroredStrategy(), and has one process. Where several save a checkpoint, each has a
file of its own here; and only the chief prints. Argument: a directory.
"""

import os
import sys

import numpy as np
import tensorflow as tf
from digits import load_data

import mpistrat
from mpistrat.tensorflow import MPIStrategy

tf.keras.utils.set_random_seed(1)  # not in the tutorial: a test compares losses
strategy = MPIStrategy()
(train_images, train_labels), (test_images, test_labels) = load_data()
train_images = train_images[..., None] / np.float32(255)
test_images = test_images[..., None] / np.float32(255)

BATCH_SIZE_PER_REPLICA = 32
GLOBAL_BATCH_SIZE = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync
EPOCHS = 4

train_dataset = tf.data.Dataset.from_tensor_slices((train_images, train_labels)).shuffle(
    len(train_images)).batch(GLOBAL_BATCH_SIZE)
test_dataset = tf.data.Dataset.from_tensor_slices((test_images, test_labels)).batch(GLOBAL_BATCH_SIZE)
train_dist_dataset = strategy.experimental_distribute_dataset(train_dataset)
test_dist_dataset = strategy.experimental_distribute_dataset(test_dataset)


def create_model() -> tf.keras.Model:
    regularizer = tf.keras.regularizers.L2(1e-5)
    return tf.keras.Sequential([
        tf.keras.Input((8, 8, 1)),
        tf.keras.layers.Conv2D(32, 3, activation="relu", kernel_regularizer=regularizer),
        tf.keras.layers.MaxPooling2D(),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(64, activation="relu", kernel_regularizer=regularizer),
        tf.keras.layers.Dense(10, kernel_regularizer=regularizer),
    ])


with strategy.scope():
    loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def compute_loss(labels: tf.Tensor, predictions: tf.Tensor, model_losses: list) -> tf.Tensor:
        loss = tf.nn.compute_average_loss(loss_object(labels, predictions))
        if model_losses:
            loss += tf.nn.scale_regularization_loss(tf.add_n(model_losses))
        return loss

    test_loss = tf.keras.metrics.Mean(name="test_loss")
    train_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
    test_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="test_accuracy")
    model = create_model()
    optimizer = tf.keras.optimizers.Adam(learning_rate=0.003)
    checkpoint = tf.train.Checkpoint(optimizer=optimizer, model=model)


def train_step(inputs: tuple) -> tf.Tensor:
    images, labels = inputs
    with tf.GradientTape() as tape:
        predictions = model(images, training=True)
        loss = compute_loss(labels, predictions, model.losses)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    train_accuracy.update_state(labels, predictions)
    return loss


def test_step(inputs: tuple) -> None:
    images, labels = inputs
    predictions = model(images, training=False)
    test_loss.update_state(loss_object(labels, predictions))
    test_accuracy.update_state(labels, predictions)


@tf.function
def distributed_train_step(dataset_inputs: tuple) -> tf.Tensor:
    per_replica_losses = strategy.run(train_step, args=(dataset_inputs,))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)


@tf.function
def distributed_test_step(dataset_inputs: tuple) -> None:
    strategy.run(test_step, args=(dataset_inputs,))


prefix = os.path.join(sys.argv[1], f"rank{mpistrat.rank()}")
for _ in range(EPOCHS):
    train_losses = [distributed_train_step(x) for x in train_dist_dataset]
    for x in test_dist_dataset:
        distributed_test_step(x)
    saved = checkpoint.write(prefix)
    results = [float(np.mean(train_losses)), float(train_accuracy.result()), float(test_loss.result()),
               float(test_accuracy.result())]
    test_loss.reset_state()
    train_accuracy.reset_state()
    test_accuracy.reset_state()

# -- Restoring, outside of the strategy. -------------------------------------------------------------------------------
eval_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="eval_accuracy")
new_model = create_model()
tf.train.Checkpoint(model=new_model).read(saved).expect_partial()
for images, labels in test_dataset:
    eval_accuracy.update_state(labels, new_model(images, training=False))

# -- Other ways to go through a dataset: an iterator, and a loop in a function. ----------------------------------------
iterator = iter(train_dist_dataset)
iterator_loss = np.mean([float(distributed_train_step(next(iterator))) for _ in range(10)])


@tf.function
def distributed_train_epoch(dataset: tf.distribute.DistributedDataset) -> tf.Tensor:
    total_loss, num_batches = 0.0, 0.0
    for x in dataset:
        per_replica_losses = strategy.run(train_step, args=(x,))
        total_loss += strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)
        num_batches += 1
    return total_loss / num_batches


epoch_loss = float(distributed_train_epoch(train_dist_dataset))
if mpistrat.rank() == 0:
    print(f"{strategy.num_replicas_in_sync} replicas, test accuracy {results[3]:.4f}, restored "
          f"{float(eval_accuracy.result()):.4f}, losses {results[0]:.3f} {iterator_loss:.3f} {epoch_loss:.3f}")
