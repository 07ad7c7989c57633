"""Modules of Horovod by path: `mpistrat.common.exceptions`, and all of `horovod` in programs that nobody edits.

`install` lets Python's import know the paths below mpistrat, for programs whose `import horovod.X` became `import
mpistrat.X`. `install_horovod` does so for `horovod` itself; the package in mpistrat/horovod/path calls it. A module
of Horovod is a thin one with the names of mpistrat's. It is not that module itself, because Python would give that
another name. A path without a counterpart is an ImportError with the reason, for programs find out by that whether
Horovod has a part. Local.
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
from ..core.settings import take_horovods
from ..process import error_text
from ..process.launch_env import RUN_KERAS_2

VERSION = "0.28.1"  # The version of Horovod whose names are there; programs compare it.
_ROOT, _OURS = "horovod", "mpistrat"
_Source = str | Mapping[str, tuple[str, str]]
# By path, below mpistrat and horovod: the module that has all its names; or the names, each with its module and name.
_BOTH: Mapping[str, _Source] = {
    "common": "mpistrat.api.common",
    "common.exceptions": {"HorovodInternalError": ("mpistrat.core.errors", "CollectiveError"),
                          "HostsUpdatedInterrupt": ("mpistrat.api.elastic.state", "HostsUpdatedInterrupt")},
    "common.process_sets": "mpistrat.api.common",
    "tensorflow.functions": "mpistrat.tensorflow",
    "tensorflow.mpi_ops": "mpistrat.tensorflow",
    "tensorflow.sync_batch_norm": "mpistrat.tensorflow",
}
# The same below horovod only. Names for other launchers and frameworks are not there.
_HOROVOD: Mapping[str, _Source] = {
    "runner": {"run": ("mpistrat", "run")},
    "common.elastic": {name: ("mpistrat.api.elastic.state", name) for name in ("ObjectState", "run")},
    "common.util": {"gpu_available": ("mpistrat", "gpu_available"), **{
        name: (__name__, name) for name in ("check_extension", "num_rank_is_power_2", "split_list")}},
}
# Paths below mpistrat that are an error. The attributes of mpistrat are explained in missing_names.
_ABSENT = {"run": missing_names.RUNNER, "_keras": missing_names.INTERNAL + "The names are in mpistrat.keras.",
           "common.basics": missing_names.INTERNAL + "The queries are in mpistrat.",
           "common.elastic": "states and `run` are in mpistrat.tensorflow.elastic and mpistrat.keras.elastic.",
           "common.mpi_ops": missing_names.INTERNAL + "The collectives are in mpistrat.",
           "common.util": missing_names.INTERNAL + "gpu_available and the other queries are in mpistrat."}
_OF_KERAS = ("horovod.keras", "horovod.tensorflow", "horovod.tensorflow.keras")
# How errors of Keras 3 begin, or what they have, where a program says what only Keras 2 knows; and what to do.
_WORDS_OF_KERAS_2 = ("TypeError: 'list' object is not callable", "experimental_run_tf_function",
                     "not recognized: {'lr'")
_KERAS_2 = "If that is a word of Keras 2 in a program that you cannot edit: mpistrat run --as-horovod=keras2 ..."


def install() -> None:
    """Let Python's import find Horovod's paths below mpistrat. mpistrat/__init__.py calls it."""
    missing_names.modules.update(f"{_OURS}.{path}" for path in _BOTH)
    if not any(isinstance(finder, _BelowMpistrat) for finder in sys.meta_path):
        sys.meta_path.append(_BelowMpistrat())


def install_horovod(package: str) -> Callable[[str], Any]:
    """Let Python's import find the modules below `package`, and return its __getattr__.

    HOROVOD_ variables become MPISTRAT_ ones, see take_horovods.
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
    """It comes last among Python's finders: it sees only paths that are no modules of mpistrat."""

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
    """Makes a module with the names of others."""

    def __init__(self, source: _Source):
        self._source = source

    def exec_module(self, module: ModuleType) -> None:
        source = self._source
        if isinstance(source, str):
            real = importlib.import_module(source)
            if module.__name__ in _OF_KERAS and RUN_KERAS_2 in os.environ:
                importlib.import_module("mpistrat.keras.bridge.keras2_words").install()
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
    """Raise ImportError if a part of Horovod was not built. Here nothing is built, and what is not there is no module.

    Local; the arguments are Horovod's.
    """


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether a number of ranks is a power of two. Local."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(values: Sequence[Any], num_parts: int) -> list[Sequence[Any]]:
    """Split a list into `num_parts` parts in order; the first ones have one element more. Empty parts are left out."""
    size, more = divmod(len(values), num_parts)
    ends = [part * size + min(part, more) for part in range(num_parts + 1)]
    return [values[start:end] for start, end in pairwise(ends) if end > start]
