"""Train ResNet-50 on ImageNet's TFRecord files, or on synthetic images, with model.fit on any number of ranks.

    mpirun -np 8 python examples/resnet50.py --data /data/imagenet --mixed-precision float16
    mpirun -np 2 python examples/resnet50.py --synthetic --image-size 64 --batch-size 8 --steps-per-epoch 10 --epochs 1

The files are train-* and validation-* with the features image/encoded (JPEG) and image/class/label (from 1). Each rank
reads its own files, so this uses Horovod's functions and not MPIStrategy, which distributes batches. The learning rate
grows with the number of images in a step, and warms up (Goyal et al., "Accurate, Large Minibatch SGD", 2017).
"""

import argparse
import glob
import os
import sys

import keras
import tensorflow as tf

import mpistrat.keras as hvd

TRAINING_IMAGES, VALIDATION_IMAGES = 1_281_167, 50_000
MEAN_OF_IMAGENET, DEVIATION_OF_IMAGENET = [123.675, 116.28, 103.53], [58.395, 57.12, 57.375]

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
source = parser.add_mutually_exclusive_group(required=True)
source.add_argument("--data", metavar="DIRECTORY", help="where train-* and validation-* are")
source.add_argument("--synthetic", action="store_true", help="random images, to measure how fast it is")
parser.add_argument("--classes", type=int, default=1000)
parser.add_argument("--image-size", type=int, default=224, help="pixels, at least 32 (default: 224)")
parser.add_argument("--batch-size", type=int, default=64, help="images per rank and step (default: 64)")
parser.add_argument("--epochs", type=int, default=90)
parser.add_argument("--warmup-epochs", type=int, default=5)
parser.add_argument("--steps-per-epoch", type=int, help="default: as many as ImageNet has for all ranks")
parser.add_argument("--validation-steps", type=int, help="default: likewise")
parser.add_argument("--learning-rate", type=float, default=0.1, help="for 256 images in a step (default: 0.1)")
parser.add_argument("--mixed-precision", choices=["float16", "bfloat16"], help="what to compute in, if not float32")
parser.add_argument("--checkpoint", metavar="PATH", help="save the model here after each epoch, as .keras")
args = parser.parse_args()

hvd.init()
chief = hvd.rank() == 0
if args.mixed_precision:
    keras.mixed_precision.set_global_policy(f"mixed_{args.mixed_precision}")
keras.utils.set_random_seed(1 + hvd.rank())


def with_label(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The image from about -2 to 2, and the label as a row of `classes` numbers."""
    return (tf.cast(image, tf.float32) - MEAN_OF_IMAGENET) / DEVIATION_OF_IMAGENET, tf.one_hot(label, args.classes)


def parse(record: tf.Tensor, training: bool) -> tuple[tf.Tensor, tf.Tensor]:
    """A record's image, cropped at random for training and at the centre otherwise, and its label."""
    features = tf.io.parse_single_example(record, {"image/encoded": tf.io.FixedLenFeature([], tf.string),
                                                   "image/class/label": tf.io.FixedLenFeature([], tf.int64)})
    jpeg, size = features["image/encoded"], [args.image_size, args.image_size]
    if training:
        begin, extent, _ = tf.image.sample_distorted_bounding_box(
            tf.io.extract_jpeg_shape(jpeg), tf.zeros([1, 0, 4]), area_range=(0.08, 1.0), min_object_covered=0,
            aspect_ratio_range=(0.75, 1.33), use_image_if_no_bounding_boxes=True)
        window = tf.concat([begin[:2], extent[:2]], axis=0)
        image = tf.image.resize(tf.image.decode_and_crop_jpeg(jpeg, window, channels=3), size)
        image = tf.image.random_flip_left_right(image)
    else:
        image = tf.image.resize(tf.image.central_crop(tf.io.decode_jpeg(jpeg, channels=3), 0.875), size)
    return with_label(image, features["image/class/label"] - 1)


def images(split: str) -> tf.data.Dataset:
    """This rank's batches of `split`, repeated without end, so that all ranks can take the same number of steps."""
    training = split == "train"
    if args.synthetic:
        shape = (args.batch_size, args.image_size, args.image_size, 3)
        batch = tf.random.uniform(shape, 0, 255), tf.random.uniform(shape[:1], 0, args.classes, tf.int32)
        return tf.data.Dataset.from_tensors(batch).map(with_label).cache().repeat()
    files = sorted(glob.glob(os.path.join(args.data, f"{split}-*")))
    if len(files) < hvd.size():
        sys.exit(f"{args.data} has {len(files)} files {split}-*, which are too few for {hvd.size()} ranks")
    dataset = tf.data.Dataset.from_tensor_slices(hvd.shard(files, uneven="pad"))  # pad: every file is read.
    if training:
        dataset = dataset.shuffle(len(files))
    dataset = dataset.interleave(tf.data.TFRecordDataset, cycle_length=8, num_parallel_calls=tf.data.AUTOTUNE,
                                 deterministic=not training)
    if training:
        dataset = dataset.shuffle(8 * args.batch_size)
    dataset = dataset.repeat().map(lambda record: parse(record, training), num_parallel_calls=tf.data.AUTOTUNE)
    return dataset.batch(args.batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


global_batch_size = args.batch_size * hvd.size()
rate = args.learning_rate * global_batch_size / 256
model = keras.applications.ResNet50(weights=None, classes=args.classes, classifier_activation=None,
                                    input_shape=(args.image_size, args.image_size, 3))
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9, nesterov=True))
model.compile(optimizer, keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
              metrics=["accuracy"])

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=args.warmup_epochs, verbose=1),
    hvd.callbacks.LearningRateScheduleCallback(rate, lambda epoch: 0.1 ** sum(epoch >= end for end in (30, 60, 80)),
                                               start_epoch=args.warmup_epochs),
]
if chief and args.checkpoint:
    callbacks.append(keras.callbacks.ModelCheckpoint(args.checkpoint))

history = model.fit(
    images("train"), epochs=args.epochs, callbacks=callbacks, verbose=2 if chief else 0,
    steps_per_epoch=args.steps_per_epoch or TRAINING_IMAGES // global_batch_size,
    validation_data=images("validation"), validation_steps=args.validation_steps or
    VALIDATION_IMAGES // global_batch_size).history
if chief:
    print(f"training loss {history['loss'][-1]:.3f}, validation accuracy {history['val_accuracy'][-1]:.3f}, "
          f"learning rate {history['lr'][-1]:.5f}, {hvd.size()} ranks")
