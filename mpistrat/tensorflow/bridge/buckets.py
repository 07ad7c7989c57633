"""The one road of all gradients: a list of tensors becomes buckets, and each bucket one crossing of the bridge."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from ...core.request import ReduceOp, Request, TensorSpec, allreduce_request, specs_of
from ...core.tuning import BUCKET_BYTES, JOINED_TENSOR_BYTES, SUBMIT_WAIT_BYTES
from . import cpu, gpu_graph
from .cpu import Wait


@dataclass
class Bucket:
    """Indices into the list of tensors: those handed over singly, and by dtype those joined first."""

    single: list[int] = field(default_factory=list)
    joined: dict[tf.DType, list[int]] = field(default_factory=dict)
    nbytes: int = 0

    @property
    def order(self) -> list[int]:
        """All indices, in the order in which the bucket's results are laid out."""
        return self.single + [i for indices in self.joined.values() for i in indices]

    @property
    def layout(self) -> tuple[tuple[int, ...], ...]:
        """As in Request: which tensors each of the arrays is made of; () when each is one, in ascending order."""
        arrays = (*((i,) for i in self.single), *map(tuple, self.joined.values()))
        return () if not self.joined and self.single == sorted(self.single) else arrays


def plan(tensors: Sequence[tuple[tf.DType, tf.TensorShape]], bucket_bytes: int = BUCKET_BYTES,
         small_bytes: int = JOINED_TENSOR_BYTES) -> list[Bucket]:
    """Distribute tensors over buckets, from last to first: backprop makes the last layer's gradients first.

    A tensor whose static shape is not known is handed over singly and counts as `small_bytes`.
    """
    buckets = [Bucket()]
    for i in reversed(range(len(tensors))):
        dtype, shape = tensors[i]
        known = shape.is_fully_defined()
        nbytes = int(np.prod(shape.as_list(), dtype=np.int64)) * dtype.size if known else small_bytes
        if buckets[-1].nbytes and buckets[-1].nbytes + nbytes > bucket_bytes:
            buckets.append(Bucket())
        buckets[-1].nbytes += nbytes
        if known and nbytes < small_bytes:
            buckets[-1].joined.setdefault(dtype, []).append(i)
        else:
            buckets[-1].single.append(i)
    for bucket in buckets:
        # One tensor needs no joining.
        for dtype in [dtype for dtype, indices in bucket.joined.items() if len(indices) == 1]:
            bucket.single += bucket.joined.pop(dtype)
    return buckets


def reduce_list(tensors: Sequence[tf.Tensor], name: str, op: ReduceOp, prescale: float = 1.0, postscale: float = 1.0,
                labels: Sequence[str] = (), patient: bool = True, bucket_bytes: int = BUCKET_BYTES,
                wire: str = "") -> list[tf.Tensor]:
    """Reduce dense tensors over all ranks; dtypes may differ. Collective.

    Args:
        tensors: The same number, dtypes and shapes on all ranks.
        name: By which the ranks meet; in a graph, bucket k of several meets as `name/k`.
        op: Average, Sum, Min, Max or Product.
        prescale: Multiplies every value before the reduction.
        postscale: Multiplies the result.
        labels: What users call the tensors, for error messages.
        patient: The last bucket waits in its submit, if it is small; False: only if no other collective follows.
        bucket_bytes: The size of the buckets; the same on all ranks.
        wire: As in Request.
    """
    if not tensors:
        return []
    device = gpu_graph.device_of(tensors)
    # On a GPU to join is a copy at the speed of its memory, and each tensor handed over is a wait for it.
    buckets = plan([(t.dtype, t.shape) for t in tensors], bucket_bytes, bucket_bytes if device else JOINED_TENSOR_BYTES)
    if tf.executing_eagerly():
        # Nothing overlaps with an eager call, and joining is done by the engine's fusion buffer.
        buckets = [Bucket(single=list(range(len(tensors))))]
    results: list[tf.Tensor | None] = [None] * len(tensors)
    for number, bucket in enumerate(buckets):
        bucket_name = name if len(buckets) == 1 else f"{name}/{number}"
        bucket_labels = tuple(labels[i] for i in bucket.order) if labels else ()
        wait = Wait.NEVER
        if number == len(buckets) - 1 and bucket.nbytes <= SUBMIT_WAIT_BYTES:
            wait = Wait.ALWAYS if patient else Wait.IF_LAST
        run = partial(cpu.run, wait=wait) if device is None else partial(gpu_graph.run, device, bucket_name)
        with nullcontext() if device is None else tf.device(device):
            reduced = _reduce_bucket(tensors, bucket, bucket_name, op, prescale, postscale, bucket_labels, wire, run)
        for i, result in reduced:
            results[i] = result
    return results


def _reduce_bucket(tensors: Sequence[tf.Tensor], bucket: Bucket, name: str, op: ReduceOp, prescale: float,
                   postscale: float, labels: tuple[str, ...], wire: str, run: Callable) -> list[tuple[int, tf.Tensor]]:
    handed = [tensors[i] for i in bucket.single]
    shapes = [t.shape for t in handed]
    joined_specs = tuple(TensorSpec(tensors[i].dtype.name, tuple(tensors[i].shape.as_list()))
                         for indices in bucket.joined.values() for i in indices)
    for indices in bucket.joined.values():
        handed.append(tf.concat([_reshaped(tensors[i], [-1]) for i in indices], axis=0))
        shapes.append(handed[-1].shape)
    layout = bucket.layout

    def make_request(arrays: list[np.ndarray]) -> Request:
        # The specs speak of every tensor, joined or not, so that a disagreement is reported of the tensor itself.
        single_specs = specs_of(arrays[:len(bucket.single)])
        return allreduce_request(name, single_specs + joined_specs, op, prescale, postscale, labels, layout, wire=wire)

    reduced = run(make_request, handed, shapes)
    results = list(zip(bucket.single, reduced, strict=False))
    for flat, indices in zip(reduced[len(bucket.single):], bucket.joined.values(), strict=True):
        parts = tf.split(flat, [tensors[i].shape.num_elements() for i in indices])
        results += [(i, _reshaped(part, tensors[i].shape)) for i, part in zip(indices, parts, strict=True)]
    return results


def _reshaped(tensor: tf.Tensor, shape: Any) -> tf.Tensor:
    # With hundreds of small tensors the nodes are what costs, and biases are flat already.
    return tensor if tensor.shape.rank == len(shape) == 1 else tf.reshape(tensor, shape)
