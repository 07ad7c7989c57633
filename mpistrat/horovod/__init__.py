"""Imports of Horovod's modules, as `mpistrat.X` and as `horovod.X`, and mpistrat.run, which is Horovod's horovod.run.

`install` makes Horovod's modules importable as `mpistrat.X`, for programs whose imports have been edited.
`install_horovod` makes them importable as `horovod.X`, for programs that are not edited. The package in
mpistrat/horovod/path calls install_horovod. An import of such a module makes a new module object, with the names of a
module of mpistrat. If mpistrat has no counterpart of the module, the import raises ImportError with the reason, because
programs use ImportError to find out whether Horovod has a feature.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any

from ..api import missing_names
from ..core.errors import LaunchError
from ..core.settings import take_horovods
from ..process import error_text
from ..process.launch_env import RUN_KERAS_2

VERSION = "0.28.1"  # The version of Horovod whose names are provided. Programs compare it.
_ROOT, _OURS = "horovod", "mpistrat"
_Source = str | Mapping[str, tuple[str, str]]
# The source of each path below mpistrat and horovod: a module with all its names, or (module, name) for each name.
_BOTH: Mapping[str, _Source] = {
    "common": "mpistrat.api.common",
    "common.exceptions": {"HorovodInternalError": ("mpistrat.core.errors", "CollectiveError"),
                          "HostsUpdatedInterrupt": ("mpistrat.api.elastic", "HostsUpdatedInterrupt")},
    "common.process_sets": "mpistrat.api.common",
    "tensorflow.functions": "mpistrat.tensorflow",
    "tensorflow.mpi_ops": "mpistrat.tensorflow",
    "tensorflow.sync_batch_norm": "mpistrat.tensorflow",
}
# The same for paths below horovod only. Names for other launchers and frameworks are left out.
_HOROVOD: Mapping[str, _Source] = {
    "runner": {"run": ("mpistrat", "run")},
    "common.elastic": {name: ("mpistrat.api.elastic", name) for name in ("ObjectState", "run")},
    "common.util": {"gpu_available": ("mpistrat", "gpu_available"), **{
        name: (__name__, name) for name in ("check_extension", "num_rank_is_power_2", "split_list")}},
}
# Paths below mpistrat that raise ImportError, with the reason. missing_names has the reasons for attributes.
_ABSENT = {"run": missing_names.RUNNER, "_keras": missing_names.INTERNAL + "The names are in mpistrat.keras.",
           "common.basics": missing_names.INTERNAL + "The queries are in mpistrat.",
           "common.elastic": "states and `run` are in mpistrat.tensorflow.elastic and mpistrat.keras.elastic.",
           "common.mpi_ops": missing_names.INTERNAL + "The collectives are in mpistrat.",
           "common.util": missing_names.INTERNAL + "gpu_available and the other queries are in mpistrat."}
_OF_KERAS = ("horovod.keras", "horovod.tensorflow", "horovod.tensorflow.keras")
# Parts of Keras 3's errors for arguments that only Keras 2 knows; and the advice for these errors.
_WORDS_OF_KERAS_2 = ("TypeError: 'list' object is not callable", "experimental_run_tf_function",
                     "not recognized: {'lr'")
_KERAS_2 = "If the program is for Keras 2 and you cannot edit it, run: mpistrat run --as-horovod=keras2 ..."


def install() -> None:
    """Make Horovod's modules importable as `mpistrat.X`. mpistrat/__init__.py calls this function."""
    missing_names.modules.update(f"{_OURS}.{path}" for path in _BOTH)
    if not any(isinstance(finder, _BelowMpistrat) for finder in sys.meta_path):
        sys.meta_path.append(_BelowMpistrat())


def install_horovod(package: str) -> Callable[[str], Any]:
    """Make the modules `horovod.X` importable, and return a __getattr__ function for the module named `package`.

    Also renames HOROVOD_ variables in the environment to MPISTRAT_ variables.
    """
    take_horovods(os.environ)
    sys.meta_path.append(_BelowHorovod())
    error_text.ADVICE.pop(error_text.NO_HOROVOD, None)
    if RUN_KERAS_2 not in os.environ:
        error_text.ADVICE.update(dict.fromkeys(_WORDS_OF_KERAS_2, _KERAS_2))

    def find(name: str) -> Any:
        ours = importlib.import_module(_OURS)
        if name == "run":
            return ours.run
        reason = missing_names.reason(_OURS, name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}{reason and f': {reason}'}")

    return find


class _BelowMpistrat(MetaPathFinder):
    """Finds Horovod's modules as `mpistrat.X`. Python asks it only for modules that no earlier finder has found."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
                  ) -> ModuleSpec | None:
        parent, _, last = fullname.rpartition(".")
        root, _, name = fullname.partition(".")
        if root != _OURS:
            return None
        if name in _BOTH:
            return ModuleSpec(fullname, _Loader(_BOTH[name]), is_package=True)
        if reason := _ABSENT.get(name) or missing_names.reason(parent, last):
            raise ModuleNotFoundError(f"No module named {fullname!r}: {reason}", name=fullname)
        return None


class _BelowHorovod(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
                  ) -> ModuleSpec | None:
        root, _, name = fullname.partition(".")
        if root != _ROOT:
            return None
        ours = f"{_OURS}.{name}"
        if name not in _HOROVOD:
            try:
                if importlib.util.find_spec(ours) is None:
                    return None
            except ModuleNotFoundError as error:
                if error.name is None or error.name.partition(".")[0] != _OURS:
                    raise
                text = str(error).replace(f"'{_OURS}.", f"'{_ROOT}.")
                raise ModuleNotFoundError(text, name=fullname) from None
        return ModuleSpec(fullname, _Loader(_HOROVOD.get(name, ours)), is_package=True)


class _Loader(Loader):
    """Fills a new module with the names of one module of mpistrat, or with single names of several modules."""

    def __init__(self, source: _Source):
        self._source = source

    def exec_module(self, module: ModuleType) -> None:
        source = self._source
        if isinstance(source, str):
            real = importlib.import_module(source)
            if module.__name__ in _OF_KERAS and RUN_KERAS_2 in os.environ:
                importlib.import_module("mpistrat.keras.bridge.patches").accept_words_of_keras2()
            vars(module).update(
                __doc__=real.__doc__, __getattr__=lambda name: getattr(real, name), __dir__=lambda: dir(real),
                __all__=getattr(real, "__all__", [name for name in vars(real) if name[0] != "_"]))
            return
        absent = missing_names.explain(module.__name__)

        def find(name: str) -> Any:
            if name not in source:
                return absent(name)
            owner, its = source[name]
            return getattr(importlib.import_module(owner), its)

        vars(module).update(__getattr__=find, __all__=list(source))


# -- names of horovod.common.util -------------------------------------------------------------------------------------


def check_extension(ext_name: str, ext_env_var: str = "", pkg_path: str = "", *args: object) -> None:
    """Do nothing. Horovod's function raises ImportError if an extension was not built. mpistrat has no extensions.

    Local. The arguments are those of Horovod's function.
    """


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether a number of ranks is a power of two. Local."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(values: Sequence[Any], num_parts: int) -> list[Sequence[Any]]:
    """Split a list into `num_parts` parts. The first parts may have one element more. Empty parts are left out."""
    size, more = divmod(len(values), num_parts)
    ends = [part * size + min(part, more) for part in range(num_parts + 1)]
    return [values[start:end] for start, end in pairwise(ends) if end > start]


# -- horovod.run ------------------------------------------------------------------------------------------------------


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

    run() returns when all ranks have ended. Any thread of a process that is not a rank may call it. The output of the
    ranks goes to the output of this process. Function, arguments and results are pickled, with cloudpickle if it is
    installed. Without cloudpickle the function must be in a module that the ranks can import.

    The pickled data are files in a temporary directory of this host (TMPDIR). At least one rank must be able to open
    the files: a rank on this host, or on a host that shares the directory. Such a rank also reads the function for the
    ranks that cannot open the files, and writes their results. Tracebacks of those ranks are only in the output.

    Args:
        func: Called on each rank, after init(). If `func` calls init() again, that call does nothing.
        args, kwargs: The arguments of `func`, the same on all ranks.
        num_proc: The number of ranks; default: 1. `np` is another name of the argument.
        hosts: The hosts and the number of ranks for each: "node1:4,node2:4". Default: this host, or the allocation of
            the batch system.
        hostfile: A file of hosts, in the syntax of Open MPI or MPICH.
        start_timeout: Seconds within which the function must begin on the ranks; default: 600.
        output_filename: A directory. Rank R prints into the files rank.R/stdout and rank.R/stderr in it. With more than
            ten ranks the numbers have leading zeros, for example rank.07.
        verbose: Print the command line of mpirun.
        mpi_args: More options for mpirun, in one string.
        executable: The Python interpreter of the ranks; default: the interpreter of this process.
        network_interface: The interface for MPI and NCCL on all hosts. `network_interfaces` is another name.
        ssh_port, ssh_identity_file: The port and the key file of ssh to the other hosts (Open MPI only).
        disable_cache, use_mpi: Accepted for compatibility with Horovod, ignored.
        min_num_proc, max_num_proc, min_np, max_np, slots, reset_limit, cooldown_range, host_discovery_script, use_gloo:
            Not supported, because they are for elastic jobs and for Gloo in Horovod. A value raises LaunchError.

    Raises:
        LaunchError: The job cannot be started with these arguments, this process is a rank itself, or the function
            cannot be pickled.
        RunError: The function has raised an exception on a rank, or a rank has ended without a result. All ranks have
            then ended. The text has the traceback of the exception. `__cause__` is the exception itself if it can be
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
                        600.0 if start_timeout is None else start_timeout, bool(verbose))
