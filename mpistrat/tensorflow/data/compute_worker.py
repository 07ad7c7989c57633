"""The command that runs the workers of a tf.data service: python -m mpistrat.tensorflow.data.compute_worker CONFIG.

    mpirun -np 4 python -m mpistrat.tensorflow.data.compute_worker service.json

Each rank is a worker. Rank 0 writes CONFIG, which the training job reads, and removes it at the end. The command ends
when the training job calls `compute_config.compute_client().shutdown()`, or its dispatchers have ended.
"""

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path

import tensorflow as tf

from ...api import runtime
from ...api.ops import barrier, broadcast_object
from ...core.errors import InvalidRequestError
from .compute_service import compute_worker_fn
from .config import SIDES, TfDataServiceConfig
from .registry import ComputeService


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command on this rank. Collective.

    Args:
        arguments: Those of the command line, without the name of the program. Default: sys.argv.

    Raises:
        SystemExit: The arguments are wrong.
    """
    parser = argparse.ArgumentParser(prog="python -m mpistrat.tensorflow.data.compute_worker", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configfile", metavar="CONFIG", type=Path,
                        help="the file for the training job, in a directory that both jobs see; it contains a secret")
    parser.add_argument("--dispatchers", type=int, default=1, help="the ranks must be a multiple (default: 1)")
    parser.add_argument("--dispatcher-side", choices=SIDES, default="compute",
                        help="the job that runs the dispatchers (default: compute)")
    parser.add_argument("--timeout", type=float, default=60,
                        help="seconds to wait for dispatchers and workers to start (default: 60)")
    options = parser.parse_args(arguments)
    runtime.init()
    topology = runtime.current().topology
    if options.dispatchers < 1 or topology.size % options.dispatchers or options.timeout <= 0:
        parser.error(f"--dispatchers {options.dispatchers} --timeout {options.timeout:g}: the number of ranks, "
                     f"{topology.size}, must be a multiple of the dispatchers, and the timeout above 0")
    tf.config.set_visible_devices([], "GPU")  # Workers compute on the CPU, and share hosts with ranks that train.
    with contextlib.ExitStack() as at_end:
        config = None
        if topology.rank == 0:
            service = at_end.enter_context(ComputeService(options.dispatchers, topology.size // options.dispatchers))
            config = TfDataServiceConfig(options.dispatchers, topology.size // options.dispatchers,
                                         options.dispatcher_side, service.addresses(), service.key, options.timeout)
            config.write(options.configfile)
            at_end.callback(_remove, options.configfile, config)
            print(f"data service: {topology.size} workers; the configuration is in {options.configfile}", flush=True)
        compute_worker_fn(broadcast_object(config, name="mpistrat.tensorflow.data/config"))
        barrier("mpistrat.tensorflow.data/end")  # The registry ends after the last rank has used it.


def _remove(path: Path, own: TfDataServiceConfig) -> None:
    """Remove the file, unless another job has replaced it."""
    with contextlib.suppress(OSError, InvalidRequestError):
        if TfDataServiceConfig.read(path) == own:
            path.unlink()


if __name__ == "__main__":
    main()
