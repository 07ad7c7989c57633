"""The docstrings of the methods that MPIStrategy inherits from TensorFlow, for `help` and the API reference.

TensorFlow's own describe several replicas in one process, TF_CONFIG and PerReplica values, of which there are none.
Called when strategy.py is imported.
"""

import inspect
import types
from typing import TypeVar

import tensorflow as tf

S = TypeVar("S", bound=type[tf.distribute.Strategy])

_TEXTS = {
    "scope": """Return a context in which variables, models, optimizers and metrics of this strategy are created.

        with strategy.scope():
            model = build_and_compile_model()

    A variable that is created in it is equal on all ranks: it gets rank 0's initial value, so its creation is
    collective. All ranks create the same variables in the same order. `fit`, `evaluate` and `predict` of a model that
    was created in it enter the context themselves.
    """,
    "run": """Call `fn` on this rank's replica, and return its result. Every rank calls it.

    A rank has one replica, so `fn` runs once in this process and its result is returned as it is: a tensor, not a
    PerReplica. `run` itself does not communicate. What `fn` calls may be collective, such as `all_reduce` of
    `tf.distribute.get_replica_context()`, and an optimizer, which sums the gradients of all ranks. For the result of
    all ranks call `reduce` or `gather`. It may be called eagerly or in a tf.function.

    Args:
        fn: A function of tensors.
        args: Its positional arguments. Of an element of a distributed dataset, `fn` gets this rank's part.
        kwargs: Its keyword arguments, likewise.
        options: tf.distribute.RunOptions; as in TensorFlow, they have no effect on CPUs and GPUs.
    """,
    "gather": """Return the values of all ranks, concatenated along `axis` in the order of the ranks. Collective.

    Every rank gets the whole result. It may be called eagerly or in a tf.function, outside of `run`. In `run`, call
    `tf.distribute.get_replica_context().all_gather`, which is differentiable.

    Args:
        value: The result of `run`: a tensor with at least one dimension, or a nested structure of such tensors. Its
            extent along `axis` may differ among the ranks; the others, and the dtype, are the same on all ranks.
        axis: The axis, the same on all ranks.

    Raises:
        ValueError: On this rank, for a scalar.
        NotImplementedError: On this rank, for tf.IndexedSlices.
        tf.errors.InvalidArgumentError: On every rank, when the ranks disagree on dtype or shape. Eagerly it is a
            MismatchError too.
    """,
    "experimental_distribute_dataset": """Return this rank's part of a dataset that has global batches. Collective.

    Iterating over it yields batches for `run`: with N ranks, each has 1/N of the rows of a global batch. TensorFlow
    splits the batches and, by the auto-shard policy of the dataset's options, chooses which rank reads what. If there
    are fewer files than ranks, AUTO falls back to DATA. A rank whose data ends earlier continues with empty batches
    until the last rank's ends. `fit` calls this for the datasets that it is given.

    Args:
        dataset: A tf.data.Dataset whose batches have the rows of all ranks together; the same on all ranks.
        options: tf.distribute.InputOptions.

    Raises:
        NotImplementedError: For InputReplicationMode.PER_REPLICA.
        ValueError: On every rank, when the ranks' elements differ in structure, dtype or shape (except for the number
            of rows), or the policy is FILE and there are fewer files than ranks.
    """,
    "distribute_datasets_from_function": """Return the dataset that `dataset_fn` makes for this rank. Collective.

    The dataset is neither sharded nor rebatched. So the function chooses this rank's rows and batches them itself:

        def dataset_fn(context):
            dataset = tf.data.Dataset.range(1000).shard(context.num_input_pipelines, context.input_pipeline_id)
            return dataset.batch(context.get_per_replica_batch_size(64))

    Args:
        dataset_fn: A function of a tf.distribute.InputContext, called once on each rank. `input_pipeline_id` is the
            rank, and `num_input_pipelines` and `num_replicas_in_sync` are the number of ranks.
        options: tf.distribute.InputOptions.

    Raises:
        NotImplementedError: For InputReplicationMode.PER_REPLICA, which has no meaning with one replica per process.
        ValueError: On every rank, when the ranks' elements differ in structure, dtype or shape (except for the number
            of rows).
    """,
    "experimental_distribute_values_from_function": """Return the value that `value_fn` makes for this rank. Local.

    The result is a tf.distribute.DistributedValues, of which the function that `run` calls gets this rank's value.

    Args:
        value_fn: A function of a tf.distribute.experimental.ValueContext, called once on each rank, with the rank as
            `replica_id_in_sync_group` and the number of ranks as `num_replicas_in_sync`.
    """,
    "experimental_local_results": """Return a tuple with this rank's part of a value. Local.

    It has one element, because a rank has one replica. For the values of all ranks call `gather`.

    Args:
        value: The result of `run`, an element of a distributed dataset, or a variable of this strategy.
    """,
    "num_replicas_in_sync": """The number of ranks, because each has one replica. Local.

    A global batch has this many times the rows of a rank's batch.
    """,
    "cluster_resolver": """A tf.distribute.cluster_resolver.ClusterResolver that describes the ranks. Local.

    `task_type` is "worker" and `task_id` is the rank. `cluster_spec()` has only workers, whose addresses end in ":0",
    because there are no servers. Rank 0 is the chief, as TensorFlow's tutorials take worker 0 where there is no
    "chief".
    """,
    "extended": """The interface that Keras and other libraries call, a tf.distribute.StrategyExtended.

    Programs use the methods of the strategy and of `tf.distribute.get_replica_context()`.
    """,
}


def documented(cls: S) -> S:
    """Class decorator: replace TensorFlow's docstrings of the methods and properties above."""
    for name, text in _TEXTS.items():
        setattr(cls, name, _with_docstring(inspect.getattr_static(cls, name), text))
    return cls


def _with_docstring(member: types.FunctionType | property, text: str) -> types.FunctionType | property:
    """A copy of a method or property with another docstring.

    A method that calls TensorFlow's would not do: in a tf.function AutoGraph would convert it, and with it what it
    calls. The copy of `run` is TensorFlow's as before.
    """
    if isinstance(member, property):
        return property(member.fget, member.fset, member.fdel, text)
    copy = types.FunctionType(member.__code__, member.__globals__, member.__name__, member.__defaults__,
                              member.__closure__)
    copy.__kwdefaults__, copy.__annotations__ = member.__kwdefaults__, dict(member.__annotations__)
    copy.__module__, copy.__qualname__ = member.__module__, member.__qualname__
    copy.__dict__.update(member.__dict__)
    copy.__doc__ = text
    return copy
