"""Switches off the autotuning thread of tf.data iterators, because the end of an iterator may wait 60 s for it.

The destructor of an iterator waits for the thread that tunes the dataset. That thread may miss the request to end, and
then sleeps for as long as the iterator has existed, up to 60 s. A callback of StartCancel wakes the thread, which then
asks IsCancelled(). But StartCancel lets IsCancelled() return true only after its callbacks:
https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/core/framework/model.cc#L2563
https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/core/framework/cancellation.cc#L84
On two cores this happened to 3 to 8 % of the iterators that were 6 s old. All other ranks then wait for that rank.

So datasets are iterated over with `options.autotune.enabled = False`. Without autotuning, TensorFlow also leaves out
two rewrites, which makes a map without `num_parallel_calls` half as fast on two cores. So this module applies the
rewrites with TensorFlow's code. AUTOTUNE then means a fixed number of parallel calls: one for each core, up to 16.
"""

import functools

import tensorflow as tf
from tensorflow.python.data.ops.dataset_ops import DatasetV2, UnaryUnchangedStructureDataset

from ..api import runtime

# The rewrites that depend on autotuning, as options.experimental_optimization has them, and whether None means yes.
_REWRITES = {"map_parallelization": True, "filter_parallelization": False, "inject_prefetch": True}
_original = DatasetV2._apply_debug_options


@functools.wraps(_original)
def _untuned(dataset: DatasetV2) -> DatasetV2:
    """Return a dataset without autotuning. TensorFlow calls this before it iterates over a dataset or reduces it."""
    dataset = _original(dataset)
    if not runtime.is_initialized():
        return dataset
    job = runtime.current()
    if job.topology.size == 1 or not job.settings.uses("fixed_input"):
        return dataset
    if "GPU" in dataset._variant_tensor.device:  # OptimizeDatasetV2 has no kernel there.
        return dataset
    # In a graph they are known as far as it has made the dataset. There options() would warn of that.
    options = dataset.options() if tf.executing_eagerly() else dataset._options_attr
    if options.autotune.enabled is False:
        return dataset
    # TensorFlow keeps with the variant what it prepares for iterators, so that all epochs use one variant. The dataset
    # keeps only the variant: with the new dataset it would make a cycle, which lives until a garbage collection.
    variant = vars(dataset).get("_mpistrat_untuned")
    if variant is None:
        variant = _without_tuning(dataset, options)
        if tf.executing_eagerly():
            dataset._mpistrat_untuned = variant
    return UnaryUnchangedStructureDataset(dataset, variant)


def _without_tuning(dataset: DatasetV2, options: tf.data.Options) -> tf.Tensor:
    """Return the variant tensor of a dataset with the rewrites of autotuning, but with autotuning switched off."""
    asked_for = options.experimental_optimization
    is_default = asked_for.apply_default_optimizations is not False
    rewrites = [name for name, default in _REWRITES.items()
                if (default and is_default if getattr(asked_for, name) is None else getattr(asked_for, name))]
    rewritten = tf.raw_ops.OptimizeDatasetV2(
        input_dataset=dataset._variant_tensor, optimizations_enabled=rewrites, optimizations_disabled=[],
        optimizations_default=[], optimization_configs=[f"{name}:autotune:true" for name in rewrites],
        **dataset._flat_structure)
    untuned = tf.data.Options()
    untuned.autotune.enabled = False
    return tf.raw_ops.OptionsDataset(input_dataset=rewritten, **dataset._flat_structure,
                                     serialized_options=untuned._to_proto().SerializeToString())


DatasetV2._apply_debug_options = _untuned
