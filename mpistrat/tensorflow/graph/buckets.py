"""Reduces lists of tensors in buckets, each bucket as one collective. All dense gradients go through `reduce_list`."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

import numpy as np
import tensorflow as tf

from ...api import runtime
from ...core.fusion import buckets_from_last
from ...core.request import ReduceOp, Request, ScaledOp, TensorSpec, allreduce_request, specs_of
from ...core.tuning import (
    BUCKET_BYTES,
    GPU_BUCKET_BYTES,
    HOSTS_BUCKET_BYTES,
    HOSTS_FIRST_BUCKET_BYTES,
    JOINED_TENSOR_BYTES,
    SUBMIT_WAIT_BYTES,
)
from ...gpu.arrays import BucketList
from ..async_op import call_site
from ..async_op.submission import Observer, Submitted
from ..xla import context as xla
from . import cpu
from .cpu import Wait
from .xla_collective import Started


@dataclass(frozen=True)
class ReduceSpec:
    """How to reduce a list of tensors. The specs of all ranks are equal, except for the function `observer`."""

    name: str  # Identifies the collective on all ranks. Tensors reduced separately get names that begin with it.
    scaled: ScaledOp  # How to reduce.
    labels: Sequence[str] = ()  # Users' names of the tensors, for error messages; may be empty.
    # The index of each tensor in the caller's list, if tensors of that list are left out (gradients that are None).
    indices: Sequence[int] = ()
    process_set: int = 0
    # Whether the submit of the last bucket waits, if the bucket is small. False: only if it is the last collective of
    # the graph.
    may_wait: bool = True
    bucket_bytes: int = 0  # The size of the buckets; 0: the size in core.tuning for a CPU or a GPU.
    wire_dtype: str = ""  # As in Request.
    # In a graph, called with the arrays of the first collective before they are submitted.
    observer: Observer | None = None
    # Whether results may be differentiated: those of public operations and of tapes, not those that an optimizer
    # applies.
    has_gradient: bool = False

    def of(self, members: Sequence[int], name: str = "") -> "ReduceSpec":
        """Return a spec for some tensors of this spec. `members`: The positions of these tensors in this spec."""
        return replace(self, name=name or self.name,
                       labels=list(map(self.labels.__getitem__, members)) if self.labels else (),
                       indices=list(map(self.indices.__getitem__, members)) if self.indices else list(members))


@dataclass
class GraphBucket:
    """The tensors of one collective, as indices in a list. Some are alone; others are concatenated, by dtype."""

    single: list[int] = field(default_factory=list)
    joined: dict[tf.DType, list[int]] = field(default_factory=dict)
    nbytes: int = 0

    @property
    def order(self) -> list[int]:
        """The indices of all tensors, in the order of the bucket's results."""
        return [*self.single, *chain.from_iterable(self.joined.values())]

    def layout(self, of_list: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return Request.layout: for each array to submit, the indices of its tensors in the caller's list.

        The result is () if each array is one tensor, the indices ascend, and no tensor of that list is left out.
        `of_list[i]`: The index in the caller's list of the tensor that has the index i in this bucket.
        """
        is_simple = not self.joined and self.single == sorted(self.single)
        if is_simple and list(of_list) == list(range(len(of_list))):
            return ()
        return tuple([(of_list[i],) for i in self.single]
                     + [tuple([of_list[i] for i in indices]) for indices in self.joined.values()])


def plan(tensors: Sequence[tuple[tf.DType, tf.TensorShape]], bucket_bytes: int = BUCKET_BYTES,
         first_bytes: int | None = None, small_bytes: int = JOINED_TENSOR_BYTES) -> list[GraphBucket]:
    """Distribute tensors over buckets, from the last tensor to the first, as core.fusion.buckets_from_last does.

    A bucket has at most `bucket_bytes` (the first: `first_bytes`) unless it is one large tensor. Tensors of less than
    `small_bytes` are concatenated. A tensor of unknown static shape is not concatenated, and counts as `small_bytes`.
    """
    known = [shape.is_fully_defined() for _, shape in tensors]
    nbytes = [int(np.prod(shape.as_list(), dtype=np.int64)) * dtype.size if is_known else small_bytes
              for (dtype, shape), is_known in zip(tensors, known, strict=True)]
    buckets = []
    for indices in buckets_from_last(nbytes, bucket_bytes, first_bytes):
        bucket = GraphBucket(nbytes=sum(nbytes[i] for i in indices))
        for i in indices:
            if known[i] and nbytes[i] < small_bytes:
                bucket.joined.setdefault(tensors[i][0], []).append(i)
            else:
                bucket.single.append(i)
        # One tensor needs no concatenation.
        for dtype in [dtype for dtype, joined in bucket.joined.items() if len(joined) == 1]:
            bucket.single += bucket.joined.pop(dtype)
        buckets.append(bucket)
    return buckets


def reduce_list(tensors: Sequence[tf.Tensor], spec: ReduceSpec) -> list[tf.Tensor]:
    """Reduce dense tensors, which may have different dtypes, over all ranks. Collective.

    The number, dtypes and shapes must be equal on all ranks. Of several buckets, bucket k is named `<spec.name>/k`.
    """
    if not tensors:
        return []
    device = call_site.device_of(tensors, spec.process_set)
    started = None
    if xla.is_compiled() and Started.is_possible(tensors):
        buckets = plan([(t.dtype, t.shape) for t in tensors], spec.bucket_bytes or GPU_BUCKET_BYTES, small_bytes=0)
        started = Started() if len(buckets) > 1 else None
    elif tf.executing_eagerly() or xla.is_compiled():
        # Nothing overlaps with an eager call or a call that waits, and the engine's fusion buffer packs the tensors.
        buckets = [GraphBucket(single=list(range(len(tensors))))]
    else:
        # On a GPU the engine packs the tensors of a bucket. Adasum combines each tensor by itself.
        is_joined = device is None and spec.scaled.op is not ReduceOp.ADASUM
        buckets = plan([(t.dtype, t.shape) for t in tensors], *limits_of(spec.bucket_bytes, device),
                       JOINED_TENSOR_BYTES if is_joined else 0)
    results: list[tf.Tensor | None] = [None] * len(tensors)
    list_ = BucketList(len(buckets))
    order = submission_order([[tensors[i] for i in bucket.order] for bucket in buckets])
    for number in order:
        bucket, wait = buckets[number], Wait.NEVER
        if number == order[-1] and bucket.nbytes <= SUBMIT_WAIT_BYTES:
            wait = Wait.ALWAYS if spec.may_wait else Wait.IF_LAST
        run = partial(cpu.run, wait=wait) if device is None else partial(
            call_site.run, device, bucket=None if len(buckets) == 1 else (list_, number))
        run = partial(run if started is None else started.run, observer=spec.observer if number == order[0] else None)
        of_bucket = replace(spec, name=spec.name if len(buckets) == 1 else f"{spec.name}/{number}")
        with nullcontext() if device is None else tf.device(device):
            reduced = _reduce_bucket(tensors, bucket, of_bucket, run)
        for i, result in reduced:
            results[i] = result
    if started is not None:
        single = [i for bucket in buckets for i in bucket.single]
        for i, result in zip(single, started.results(), strict=True):
            results[i] = result
    return results


def submission_order(buckets: Sequence[Sequence[tf.Tensor]]) -> list[int]:
    """Return the numbers of the buckets, in the order in which the backward pass probably computes their tensors.

    The order of the variables need not be the order in which layers are called. So this rank estimates when a tensor is
    computed: by the length of the longest path in the graph to the tensor. The result may differ between ranks.
    """
    if len(buckets) < 2 or tf.executing_eagerly() or xla.is_compiled():
        return list(range(len(buckets)))
    depths: dict[str, int] = {}
    for op in tf.compat.v1.get_default_graph().get_operations():
        depths[op.name] = 1 + max([depths.get(tensor.op.name, 0) for tensor in op.inputs], default=0)
    ready = [max([depths.get(tensor.op.name, 0) for tensor in bucket], default=0) for bucket in buckets]
    return sorted(range(len(buckets)), key=ready.__getitem__)


def limits_of(asked: int, device: str | None) -> tuple[int, int]:
    """Return the largest sizes of a bucket and of the first bucket, in bytes. `asked`: The size to use; 0: defaults."""
    job = runtime.current()
    # Between hosts, sending the data of a bucket takes longer than the overhead of a bucket.
    if not asked and device is None and job.spans_hosts and job.settings.uses("small_buckets"):
        return HOSTS_BUCKET_BYTES, HOSTS_FIRST_BUCKET_BYTES
    most = asked or (GPU_BUCKET_BYTES if device else BUCKET_BYTES)
    return most, most


def _reduce_bucket(tensors: Sequence[tf.Tensor], bucket: GraphBucket, spec: ReduceSpec,
                   run: Callable) -> list[tuple[int, tf.Tensor]]:
    """Reduce one bucket; return (index, result) pairs. `spec`: For all `tensors`, but named after the bucket."""
    order, layout = bucket.order, bucket.layout(spec.indices or range(len(tensors)))
    own_labels = tuple(map(spec.labels.__getitem__, order)) if spec.labels else ()
    joined_specs = tuple([TensorSpec(tensors[i].dtype.name, tuple(tensors[i].shape.as_list()))
                          for i in order[len(bucket.single):]])
    submitted = list(map(tensors.__getitem__, bucket.single))
    for indices in bucket.joined.values():
        # With hundreds of small tensors the number of nodes dominates the cost, and biases are flat already.
        submitted.append(tf.concat([tensors[i] if tensors[i].shape.rank == 1 else tf.reshape(tensors[i], [-1])
                                    for i in indices], axis=0))

    def make_request(arrays: Submitted) -> Request:
        # The specs list every tensor, concatenated or not, so that a mismatch error names the tensor itself.
        single_specs = specs_of(arrays)[:len(bucket.single)]
        return allreduce_request(spec.name, single_specs + joined_specs, spec.scaled, own_labels, layout,
                                 wire_dtype=spec.wire_dtype, process_set=spec.process_set)

    reduced = run(spec.name, make_request, submitted, [t.shape for t in submitted], spec.process_set)
    results = list(zip(bucket.single, reduced, strict=False))
    for flat, indices in zip(reduced[len(bucket.single):], bucket.joined.values(), strict=True):
        parts = tf.split(flat, [tensors[i].shape.num_elements() for i in indices])
        results += [(i, part if tensors[i].shape.rank == 1 else tf.reshape(part, tensors[i].shape))
                    for i, part in zip(indices, parts, strict=True)]
    return results
