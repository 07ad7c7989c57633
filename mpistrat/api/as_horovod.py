"""`import horovod` finds mpistrat, in programs that import it by that name and that nobody edits.

The package `horovod` in mpistrat/cli/horovod_path calls `install`. `horovod.X` is then a thin module with the names of
`mpistrat.X`. It is not that module itself, because Python would give that another name. What mpistrat has not is an
ImportError with the reason, for programs find out by that whether Horovod has a part. Local.
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

from ..core.settings import take_horovods
from ..process import error_text
from ..process.launch_env import RUN_KERAS_2
from . import missing_names

VERSION = "0.28.1"  # The version of Horovod whose names are there; programs compare it.
_ROOT, _OURS = "horovod", "mpistrat"
# Modules without a counterpart of the same path below mpistrat: their names, by Horovod's, with the modules that have
# them. What is for other launchers and frameworks is no name here.
_OWN: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "runner": {"run": ("mpistrat", "run")},
    "common.elastic": {name: ("mpistrat.api.elastic.state", name) for name in ("ObjectState", "run")},
    "common.util": {"gpu_available": ("mpistrat", "gpu_available"), **{
        name: ("mpistrat.api.as_horovod", name) for name in ("check_extension", "num_rank_is_power_2", "split_list")}},
}
_OF_KERAS = ("keras", "tensorflow", "tensorflow.keras")
# How errors of Keras 3 begin, or what they have, where a program says what only Keras 2 knows; and what to do.
_WORDS_OF_KERAS_2 = ("TypeError: 'list' object is not callable", "experimental_run_tf_function",
                     "not recognized: {'lr'")
_KERAS_2 = "If that is a word of Keras 2 in a program that you cannot edit: mpistrat run --as-horovod=keras2 ..."


def install(package: str) -> Callable[[str], Any]:
    """Let Python's import find the modules below `package`, and return its __getattr__.

    HOROVOD_ variables become MPISTRAT_ ones, see take_horovods.
    """
    take_horovods(os.environ)
    sys.meta_path.append(_Finder())
    error_text.ADVICE.pop(error_text.NO_HOROVOD, None)
    if RUN_KERAS_2 not in os.environ:
        error_text.ADVICE.update(dict.fromkeys(_WORDS_OF_KERAS_2, _KERAS_2))

    def find(name: str) -> Any:
        if name == "run":
            return getattr(importlib.import_module(_OURS), name)
        importlib.import_module(_OURS)
        reason = missing_names.reason(_OURS, name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}{reason and f': {reason}'}")

    return find


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
                  ) -> ModuleSpec | None:
        root, _, name = fullname.partition(".")
        if root != _ROOT:
            return None
        if name not in _OWN:
            try:
                found = importlib.util.find_spec(f"{_OURS}.{name}")
            except ModuleNotFoundError as error:
                if error.name is None or error.name.partition(".")[0] != _OURS:
                    raise
                text = str(error).replace(f"'{_OURS}.", f"'{_ROOT}.")
                raise ModuleNotFoundError(text, name=fullname) from None
            if found is None:
                return None
        return ModuleSpec(fullname, _Loader(), is_package=True)


class _Loader(Loader):
    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__.removeprefix(f"{_ROOT}.")
        names = _OWN.get(name)
        if names is None:
            self._show(module, importlib.import_module(f"{_OURS}.{name}"))
            if name in _OF_KERAS and RUN_KERAS_2 in os.environ:
                importlib.import_module("mpistrat.keras.keras2_words").install()
            return

        def find(attribute: str) -> Any:
            if attribute not in names:
                raise AttributeError(f"module {module.__name__!r} has no attribute {attribute!r}")
            owner, its = names[attribute]
            return getattr(importlib.import_module(owner), its)

        module.__getattr__ = find  # type: ignore[method-assign]
        vars(module)["__all__"] = list(names)

    @staticmethod
    def _show(module: ModuleType, real: ModuleType) -> None:
        def find(attribute: str) -> Any:
            return getattr(real, attribute)

        module.__doc__, module.__getattr__ = real.__doc__, find  # type: ignore[method-assign]
        vars(module).update(__all__=getattr(real, "__all__", [each for each in vars(real) if each[0] != "_"]),
                            __dir__=lambda: dir(real))


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
