"""Environment variables of CUDA and NCCL that decide whether kernels of several communicators run beside each other.

An NCCL kernel waits on the GPU for the same kernel on the other ranks. If something keeps a kernel of another
communicator from its start meanwhile, ranks that started the two in different orders wait for each other for ever:
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html. Pure.
"""

from collections.abc import MutableMapping


def set_cuda_variables(environ: MutableMapping[str, str], nccl_streams: int) -> None:
    """Set those that the user has not set. CUDA and NCCL read them once, when the first of their functions is called.

    Args:
        environ: The environment of this process.
        nccl_streams: The number of communicators of a group of ranks.
    """
    # Streams beyond this number share a queue, in which a kernel waits for the one before. CUDA's default is 8, and
    # TensorFlow alone has four.
    environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    # A kernel that is loaded when it is first launched may wait for all that run.
    environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    if nccl_streams > 1:
        # The engine launches in the same order on all ranks, and NCCL then keeps the GPU to this order.
        environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
