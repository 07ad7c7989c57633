"""The cases of `mpistrat bench`: single arrays, many small arrays, and the gradients of ResNet-50 and BERT-base.

Called by every rank of a benchmark.
"""

import math
from dataclasses import dataclass

Shapes = list[tuple[int, ...]]


def resnet50() -> Shapes:
    """Shapes of ResNet-50's trainable variables (He et al., 2015), 1000 classes: 161 tensors, 102 MB in float32."""
    shapes: Shapes = [(7, 7, 3, 64), (64,), (64,)]
    channels = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            kernels = [(1, 1, channels, width), (3, 3, width, width), (1, 1, width, 4 * width)]
            if block == 0:
                kernels.insert(0, (1, 1, channels, 4 * width))
            for kernel in kernels:
                shapes += [kernel, kernel[-1:], kernel[-1:]]  # with the batch normalisation after it
            channels = 4 * width
    return [*shapes, (2048, 1000), (1000,)]


def bert_base() -> Shapes:
    """Shapes of BERT-base's trainable variables (Devlin et al., 2018) with pooler: 199 tensors, 438 MB in float32."""
    width, inner = 768, 3072
    vector = (width,)
    shapes: Shapes = [(30522, width), (512, width), (2, width), vector, vector]
    for _ in range(12):
        shapes += [(width, width), vector] * 4
        shapes += [vector, vector] * 2
        shapes += [(width, inner), (inner,), (inner, width), vector]
    return [*shapes, (width, width), vector]


# Maps mpistrat's name of a collective to the name of the same collective in MPI.
OPERATIONS = {"allreduce": "MPI_Allreduce", "reducescatter": "MPI_Reduce_scatter", "alltoall": "MPI_Alltoallv"}


@dataclass(frozen=True)
class Case:
    """A collective on float32 arrays."""

    shapes: Shapes  # Shapes of the arrays on each rank. Only an all-reduce may have several arrays.
    operation: str = "allreduce"  # A key of OPERATIONS.

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays of one rank together."""
        return 4 * sum(math.prod(shape) for shape in self.shapes)


_SINGLE: dict[str, Shapes] = {
    "1KB": [(256,)], "64KB": [(2**14,)], "1MB": [(2**18,)], "16MB": [(2**22,)], "64MB": [(2**24,)]}

CASES = {
    **{name: Case(shapes) for name, shapes in _SINGLE.items()},
    "400x1KB": Case([(256,)] * 400), "resnet50": Case(resnet50()), "bert": Case(bert_base()),
    **{f"{operation}-{name}": Case(shapes, operation) for operation in ("reducescatter", "alltoall")
       for name, shapes in _SINGLE.items()}}
