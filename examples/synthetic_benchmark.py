"""Measure how many synthetic images per second a network of keras.applications trains on, per rank and in total.

    python examples/synthetic_benchmark.py
    mpirun -np 2 python examples/synthetic_benchmark.py --model MobileNetV2 --image-size 96 --batch-size 8

All images are random and in memory, so that only computing and averaging gradients is measured. Compare the total with
that of one rank.
"""

import argparse
import time

import keras
import numpy as np
import tensorflow as tf

import mpistrat.tensorflow as hvd

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="ResNet50", metavar="NAME", help="of keras.applications (default: ResNet50)",
                    choices=[name for name in dir(keras.applications) if name[0].isupper()])
parser.add_argument("--image-size", type=int, default=224, help="pixels (default: 224)")
parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (default: 32)")
parser.add_argument("--warmup-steps", type=int, default=10, help="steps that are not measured (default: 10)")
parser.add_argument("--steps", type=int, default=10, help="steps in each measurement (default: 10)")
parser.add_argument("--measurements", type=int, default=10)
parser.add_argument("--mixed-precision", choices=["float16", "bfloat16"], help="what to compute in, if not float32")
parser.add_argument("--compression", choices=["none", "fp16", "bf16"], default="none", help="of the gradients")
args = parser.parse_args()

hvd.init()
chief = hvd.rank() == 0
if args.mixed_precision:
    keras.mixed_precision.set_global_policy(f"mixed_{args.mixed_precision}")

model = getattr(keras.applications, args.model)(weights=None, classifier_activation=None,
                                                input_shape=(args.image_size, args.image_size, 3))
optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
optimizer.build(model.trainable_variables)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
images = tf.random.uniform((args.batch_size, args.image_size, args.image_size, 3))
labels = tf.random.uniform((args.batch_size,), 0, 1000, tf.int32)


@tf.function
def train_step() -> tf.Tensor:
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(images, training=True))
    tape = hvd.DistributedGradientTape(tape, compression=getattr(hvd.Compression, args.compression))
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return loss


def run(steps: int) -> float:
    """Seconds for so many steps."""
    began = time.perf_counter()
    for _ in range(steps):
        loss = train_step()
    loss.numpy()  # A GPU may still be computing when train_step returns.
    return time.perf_counter() - began


hvd.broadcast_variables(model.weights + optimizer.variables, root_rank=0)
if chief:
    print(f"{args.model}, {model.count_params():,} parameters, {args.image_size} x {args.image_size} pixels, "
          f"{args.batch_size} images per step on each of {hvd.size()} ranks", flush=True)
run(max(args.warmup_steps, 1))
rates = []
for number in range(args.measurements):
    rates.append(args.batch_size * args.steps / run(args.steps))
    if chief:
        print(f"measurement {number + 1}: {rates[-1]:.1f} images/s on this rank", flush=True)

# Of each measurement the mean and the sum over the ranks; of all measurements the mean and the interval of 95 %.
of_all_ranks = hvd.allreduce(tf.constant(rates), op=hvd.Sum).numpy()
if chief:
    for what, values in (("per rank", of_all_ranks / hvd.size()), (f"in total on {hvd.size()} ranks", of_all_ranks)):
        print(f"{np.mean(values):.1f} +- {1.96 * np.std(values):.1f} images/s {what}")
