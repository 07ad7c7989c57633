"""Train on rows that do not divide evenly: ranks without batches join, and the others go on.

    mpirun -np 2 python examples/join_digits.py

With Keras' fit, DistributedOptimizer(..., uneven="join") does the same.
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import mpistrat.tensorflow as hvd

hvd.init()

# All rows, also those that are left when each rank has as many: the first ranks have one batch more.
x, y = load_digits(return_X_y=True)
batches = tf.data.Dataset.from_tensor_slices((x.astype("float32") / 16, y)).batch(32).shard(hvd.size(), hvd.rank())

model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
optimizer = keras.optimizers.Adam(1e-2)
optimizer.build(model.trainable_variables)
loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
variables = model.weights + optimizer.variables
hvd.broadcast_variables(variables, root_rank=0)


@tf.function
def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        loss = loss_function(labels, model(images, training=True))
    # An average over the ranks that still have batches.
    gradients = hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    return loss


for epoch in range(3):
    steps = 0
    for images, labels in batches:
        loss = train_step(images, labels)
        steps += 1
    last = int(hvd.join())  # Waits for all ranks. The last one has made all updates.
    hvd.broadcast_variables(variables, root_rank=last)
    all_steps, losses = hvd.allgather_object(steps), hvd.allgather_object(float(loss))
    if hvd.rank() == 0:
        print(f"epoch {epoch + 1}: steps of the ranks {all_steps}, loss {sum(losses) / len(losses):.3f}", flush=True)
