"""run: call a function on the ranks of a new job. It has the signature of horovod.run.

For users, in a process that is not a rank.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..core.errors import LaunchError

_START_TIMEOUT_S = 600.0


def run(func: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None,
        num_proc: int | None = None, min_num_proc: int | None = None, max_num_proc: int | None = None,
        slots: int | None = None, reset_limit: int | None = None, cooldown_range: Sequence[int] | None = None,
        hosts: str | None = None, hostfile: str | None = None, host_discovery_script: str | None = None,
        start_timeout: float | None = None, ssh_port: int | None = None, ssh_identity_file: str | None = None,
        disable_cache: bool | None = None, output_filename: str | None = None, verbose: int | bool | None = None,
        use_gloo: bool | None = None, use_mpi: bool | None = None, mpi_args: str | None = None,
        network_interface: str | None = None, network_interfaces: str | None = None, executable: str | None = None,
        np: int | None = None, min_np: int | None = None, max_np: int | None = None) -> list[Any]:
    """Start `np` ranks, call `func(*args, **kwargs)` on each after init(), and return the results in rank order.

    It returns when all ranks have ended. Any thread may call it, in a process that is not a rank. The output of the
    ranks goes to the output of this process. Function, arguments and results are pickled, with cloudpickle if it is
    installed; without cloudpickle the function must be in a module that the ranks can import.

    The pickled data go through a temporary directory of this host (TMPDIR). With several hosts, either all hosts share
    the directory, or this host has a rank. Without a shared directory the traceback of a rank on another host is in the
    job's output only.

    Args:
        func: Called on each rank, after init(). If `func` calls init() again, that call does nothing.
        args, kwargs: The arguments of `func`, the same on all ranks.
        num_proc: The number of ranks; default: 1. `np` is another name of the argument.
        hosts: The hosts and the number of ranks for each: "node1:4,node2:4". Default: this host, or the allocation of
            the batch system.
        hostfile: A file of hosts, in the syntax of Open MPI or MPICH.
        start_timeout: Seconds within which the function must begin on the ranks; default: 600.
        output_filename: A directory. Rank R prints into the files rank.R/stdout and rank.R/stderr below it; with more
            than ten ranks rank.0R.
        verbose: Print the command line of mpirun.
        mpi_args: More options for mpirun, in one string.
        executable: The Python interpreter of the ranks; default: the interpreter of this process.
        network_interface: The interface for MPI and NCCL on all hosts. `network_interfaces` is another name.
        ssh_port, ssh_identity_file: For ssh to the other hosts (Open MPI only).
        disable_cache, use_mpi: Accepted for compatibility with Horovod, ignored.
        min_num_proc, max_num_proc, min_np, max_np, slots, reset_limit, cooldown_range, host_discovery_script, use_gloo:
            Not supported: a value raises LaunchError. They are for Horovod's elastic jobs and for Gloo.

    Raises:
        LaunchError: The job cannot be started with these arguments, this process is a rank itself, or the function
            cannot be pickled.
        RunError: The function has raised an exception on a rank, or a rank has ended without a result. The whole job
            has ended. The text has the traceback of the rank. `__cause__` is the exception itself, if it can be
            pickled.
    """
    elastic = {"min_num_proc": min_num_proc, "max_num_proc": max_num_proc, "min_np": min_np, "max_np": max_np,
               "slots": slots, "reset_limit": reset_limit, "cooldown_range": cooldown_range,
               "host_discovery_script": host_discovery_script}
    given = [name for name, value in elastic.items() if value is not None]
    if given:
        raise LaunchError(f"run() does not take {', '.join(given)}: the number of ranks is fixed in jobs of run(). "
                          "For jobs whose number of ranks may change, use `mpistrat run --elastic`.")
    if use_gloo:
        raise LaunchError("run() does not take use_gloo: mpistrat has no Gloo. Leave it out; the ranks use MPI.")
    if hosts is not None and hostfile is not None:
        raise LaunchError("run() takes hosts or hostfile, not both.")
    if np is not None and num_proc is not None and np != num_proc:
        raise LaunchError(f"np and num_proc are two names of one argument. Received: np={np}, num_proc={num_proc}")
    ranks = np if np is not None else num_proc if num_proc is not None else 1
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise LaunchError(f"np must be a number of ranks, at least 1. Received: {ranks!r}")
    if not callable(func):
        raise LaunchError(f"func must be a function. Received: {func!r}")
    from ..cli.function import run_function  # Only here: `import mpistrat` loads no launcher.
    launch_options = {
        "-H": hosts, "--hostfile": hostfile, "--network-interface": network_interface or network_interfaces,
        "--ssh-port": ssh_port, "--ssh-identity-file": ssh_identity_file, "--mpi-args": mpi_args,
        "--output-filename": output_filename}
    options = [f"-np={ranks}", *(f"{name}={value}" for name, value in launch_options.items() if value is not None)]
    return run_function((func, tuple(args), dict(kwargs or {})), options, executable or sys.executable,
                        _START_TIMEOUT_S if start_timeout is None else start_timeout, bool(verbose))
