"""A training loop of the script's own: a tape, clipping, a last batch of another size, and validation."""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import mpistrat.tensorflow as hvd

hvd.init()
x, y = load_digits(return_X_y=True)
x = (x / 16).astype("float32")
train = tf.data.Dataset.from_tensor_slices(hvd.shard(x[:1500], y[:1500])).shuffle(1500).batch(64)
valid = tf.data.Dataset.from_tensor_slices((x[1500:], y[1500:])).shard(hvd.size(), hvd.rank()).batch(64)

model = keras.Sequential([keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10)])
optimizer = keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(5e-3 * hvd.size(), 200))
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@tf.function
def train_step(images, labels, first):
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(images, training=True))
    tape = hvd.DistributedGradientTape(tape, compression=hvd.Compression.fp16)
    gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, model.trainable_variables), 1.0)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    if first:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(optimizer.variables, root_rank=0)
    return loss, norm


@tf.function
def right(images, labels):
    return tf.reduce_sum(tf.cast(tf.argmax(model(images), axis=1) == labels, tf.float32))


for epoch in range(3):
    for step, (images, labels) in enumerate(train):
        loss, norm = train_step(images, labels, epoch == 0 and step == 0)
    # The ranks have different numbers of rows, so they add up what they have counted.
    counts = tf.reduce_sum([(right(*batch), float(len(batch[1]))) for batch in valid], axis=0)
    counts = hvd.allreduce(counts, op=hvd.Sum)
    if hvd.rank() == 0:
        print(f"epoch {epoch}: loss {float(loss):.3f}, norm {float(norm):.3f}, "
              f"accuracy {float(counts[0] / counts[1]):.3f} of {int(counts[1])} rows")
