"""TensorFlow's tutorial "Multi-worker training with Keras": fit, files of the chief, fault tolerance.

The tutorial writes TF_CONFIG, and makes tf.distribute.MultiWorkerMirroredStrategy(). Argument: a directory.
"""

import os
import sys

import numpy as np
import tensorflow as tf
from digits import load_data

from mpistrat.tensorflow import MPIStrategy

DIRECTORY = sys.argv[1]
PER_WORKER_BATCH_SIZE = 32
EPOCHS, STEPS_PER_EPOCH = 4, 20

tf.keras.utils.set_random_seed(1)  # not in the tutorial: a test compares losses
strategy = MPIStrategy()
num_workers = strategy.num_replicas_in_sync


def digits_dataset(batch_size: int) -> tf.data.Dataset:
    (x_train, y_train), _ = load_data()
    x_train = x_train / np.float32(255)
    return tf.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(len(x_train)).repeat().batch(batch_size)


def build_and_compile_cnn_model() -> tf.keras.Model:
    model = tf.keras.Sequential([
        tf.keras.layers.InputLayer(shape=(8, 8)),
        tf.keras.layers.Reshape(target_shape=(8, 8, 1)),
        tf.keras.layers.Conv2D(32, 3, activation="relu"),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(64, activation="relu"),
        tf.keras.layers.Dense(10),
    ])
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.SGD(learning_rate=0.05),
        metrics=["accuracy"])
    return model


global_batch_size = PER_WORKER_BATCH_SIZE * num_workers
multi_worker_dataset = digits_dataset(global_batch_size)
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
with strategy.scope():
    multi_worker_model = build_and_compile_cnn_model()
first = multi_worker_model.fit(multi_worker_dataset.with_options(options), epochs=EPOCHS,
                               steps_per_epoch=STEPS_PER_EPOCH, verbose=0).history["loss"]

# -- Saving: every worker saves, and only the chief's file is kept. ----------------------------------------------------
task_type, task_id = strategy.cluster_resolver.task_type, strategy.cluster_resolver.task_id
cluster_spec = strategy.cluster_resolver.cluster_spec()


def is_chief(task_type: str | None, task_id: int) -> bool:
    return task_type in (None, "chief") or (
        task_type == "worker" and task_id == 0 and "chief" not in cluster_spec.as_dict())


def write_filepath(filepath: str, task_type: str | None, task_id: int) -> str:
    """The file itself for the chief, and one in a directory for what is thrown away for another worker."""
    if is_chief(task_type, task_id):
        return filepath
    directory = os.path.join(os.path.dirname(filepath), f"workertemp_{task_id}")
    tf.io.gfile.makedirs(directory)
    return os.path.join(directory, os.path.basename(filepath))


def throw_away(path: str) -> None:
    if not is_chief(task_type, task_id):
        tf.io.gfile.rmtree(os.path.dirname(path))


write_model_path = write_filepath(os.path.join(DIRECTORY, "model.keras"), task_type, task_id)
multi_worker_model.save(write_model_path)
loaded_model = tf.keras.models.load_model(write_model_path)
throw_away(write_model_path)
(_, _), (x_test, y_test) = load_data()
x_test = x_test / np.float32(255)
loss, accuracy = loaded_model.evaluate(x_test, y_test, verbose=0)

# -- Checkpoints: the same with tf.train.CheckpointManager, to be trained on. ------------------------------------------
checkpoint = tf.train.Checkpoint(model=multi_worker_model)
write_checkpoint_dir = write_filepath(os.path.join(DIRECTORY, "ckpt", "all"), task_type, task_id)
manager = tf.train.CheckpointManager(checkpoint, directory=write_checkpoint_dir, max_to_keep=1)
latest = manager.save()
with strategy.scope():
    restored = build_and_compile_cnn_model()
tf.train.Checkpoint(model=restored).restore(latest).expect_partial()
throw_away(write_checkpoint_dir)
before = restored.evaluate(x_test, y_test, verbose=0)
trained_on = restored.fit(multi_worker_dataset, epochs=2, steps_per_epoch=STEPS_PER_EPOCH, verbose=0).history["loss"]

# -- Fault tolerance: BackupAndRestore, the same for all workers. ------------------------------------------------------
callbacks = [tf.keras.callbacks.BackupAndRestore(backup_dir=os.path.join(DIRECTORY, "backup"))]
with strategy.scope():
    multi_worker_model = build_and_compile_cnn_model()
history = multi_worker_model.fit(multi_worker_dataset, epochs=3, steps_per_epoch=STEPS_PER_EPOCH, callbacks=callbacks,
                                 verbose=0)

kept = sorted(name for name in os.listdir(DIRECTORY) if not name.startswith("workertemp"))
if is_chief(task_type, task_id):
    losses = " ".join(f"{loss:.3f}" for loss in [*first, *trained_on])
    print(f"{num_workers} workers, accuracy {accuracy:.3f}, restored {before[1]:.3f}, losses {losses}, "
          f"{len(history.epoch)} epochs with backups, kept {','.join(kept)}")
