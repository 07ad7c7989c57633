"""Single all-reduces by a backend for GPU tensors. The executor keeps what reduces arrays of the same sizes."""

from collections.abc import Sequence

from mpistrat.core.arithmetic import Reduction
from mpistrat.gpu.arrays import GpuArray
from mpistrat.gpu.backend import GpuBackend


def allreduce(backend: GpuBackend, sources: Sequence[GpuArray], targets: Sequence[GpuArray], reduction: Reduction,
              wire_dtype: str = "") -> None:
    """Reduce each of `sources` over all ranks into the target of the same index. Collective."""
    reduce = backend.reducer(sources, reduction, wire_dtype)
    reduce([source.address for source in sources], [target.address for target in targets])
