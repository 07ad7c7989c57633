"""TensorFlow's tutorial "Custom training loop with Keras and MultiWorkerMirroredStrategy".

The tutorial writes TF_CONFIG, and makes tf.distribute.MultiWorkerMirroredStrategy(). Arguments: a directory, and after
how many epochs to end, as if killed.
"""

import os
import sys

import numpy as np
import tensorflow as tf
from digits import load_data

from mpistrat.tensorflow import MPIStrategy

CHECKPOINT_DIR = os.path.join(sys.argv[1], "ckpt")
END_AFTER = int(sys.argv[2])
PER_WORKER_BATCH_SIZE = 32
NUM_EPOCHS, NUM_STEPS_PER_EPOCH = 4, 20

tf.keras.utils.set_random_seed(1)  # not in the tutorial: a test compares losses
strategy = MPIStrategy()
global_batch_size = PER_WORKER_BATCH_SIZE * strategy.num_replicas_in_sync


def dataset_fn(global_batch_size: int, input_context: tf.distribute.InputContext) -> tf.data.Dataset:
    batch_size = input_context.get_per_replica_batch_size(global_batch_size)
    (x_train, y_train), _ = load_data()
    dataset = tf.data.Dataset.from_tensor_slices((x_train / np.float32(255), y_train)).shuffle(len(x_train)).repeat()
    dataset = dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
    return dataset.batch(batch_size)


def build_cnn_model() -> tf.keras.Model:
    regularizer = tf.keras.regularizers.L2(1e-4)
    return tf.keras.Sequential([
        tf.keras.Input(shape=(8, 8)),
        tf.keras.layers.Reshape(target_shape=(8, 8, 1)),
        tf.keras.layers.Conv2D(32, 3, activation="relu", kernel_regularizer=regularizer),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(64, activation="relu", kernel_regularizer=regularizer),
        tf.keras.layers.Dense(10, kernel_regularizer=regularizer),
    ])


with strategy.scope():
    multi_worker_model = build_cnn_model()
    multi_worker_dataset = strategy.distribute_datasets_from_function(
        lambda input_context: dataset_fn(global_batch_size, input_context))
    optimizer = tf.keras.optimizers.RMSprop(learning_rate=0.001)
    train_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
    # So that a checkpoint can be restored before the first step.
    optimizer.build(multi_worker_model.trainable_variables)


@tf.function
def train_step(iterator: tf.data.Iterator) -> tf.Tensor:
    """A step on the next global batch; the sum of the replicas' losses."""
    def step_fn(inputs: tuple) -> tf.Tensor:
        x, y = inputs
        with tf.GradientTape() as tape:
            predictions = multi_worker_model(x, training=True)
            per_example_loss = tf.keras.losses.SparseCategoricalCrossentropy(
                from_logits=True, reduction="none")(y, predictions)
            loss = tf.nn.compute_average_loss(per_example_loss)
            model_losses = multi_worker_model.losses
            if model_losses:
                loss += tf.nn.scale_regularization_loss(tf.add_n(model_losses))
        gradients = tape.gradient(loss, multi_worker_model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, multi_worker_model.trainable_variables))
        train_accuracy.update_state(y, predictions)
        return loss

    per_replica_losses = strategy.run(step_fn, args=(next(iterator),))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)


task_type, task_id = strategy.cluster_resolver.task_type, strategy.cluster_resolver.task_id
cluster_spec = strategy.cluster_resolver.cluster_spec()
chief = task_type in (None, "chief") or (
    task_type == "worker" and task_id == 0 and "chief" not in cluster_spec.as_dict())
epoch = tf.Variable(initial_value=tf.constant(0, dtype=tf.int64), name="epoch")
step_in_epoch = tf.Variable(initial_value=tf.constant(0, dtype=tf.int64), name="step_in_epoch")
checkpoint = tf.train.Checkpoint(model=multi_worker_model, optimizer=optimizer, epoch=epoch,
                                 step_in_epoch=step_in_epoch)
# Every worker saves; what is not the chief's is thrown away.
write_dir = CHECKPOINT_DIR if chief else f"{CHECKPOINT_DIR}_workertemp_{task_id}"
manager = tf.train.CheckpointManager(checkpoint, directory=write_dir, max_to_keep=1)
latest = tf.train.latest_checkpoint(CHECKPOINT_DIR)
if latest:
    checkpoint.restore(latest)

first = int(epoch)
while epoch < min(NUM_EPOCHS, END_AFTER):
    iterator = iter(multi_worker_dataset)
    total_loss = 0.0
    while step_in_epoch < NUM_STEPS_PER_EPOCH:
        total_loss += train_step(iterator)
        step_in_epoch.assign_add(1)
    train_loss = total_loss / tf.cast(step_in_epoch, tf.float32)
    accuracy = train_accuracy.result()
    train_accuracy.reset_state()
    epoch.assign_add(1)
    step_in_epoch.assign(0)
    manager.save()
    if not chief:
        tf.io.gfile.rmtree(write_dir)
    elif epoch == min(NUM_EPOCHS, END_AFTER):
        print(f"epochs {first} to {epoch.numpy()}, loss {train_loss.numpy():.3f}, accuracy {accuracy.numpy():.3f}, "
              f"{strategy.num_replicas_in_sync} workers")
