"""Horovod's module paths below mpistrat: those with a meaning can be imported, others are an ImportError that says why.

Programs import names from Horovod's modules by path, as `from horovod.common.exceptions import HorovodInternalError`.
`install` adds a finder to Python's, which comes last: it sees only paths that are no modules of mpistrat. Called by
mpistrat/__init__.py; local.
"""

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from . import missing_names

_ROOT = "mpistrat."
# Of each path the module that has its names; or the names, of other modules, by Horovod's.
_THERE: Mapping[str, str | Mapping[str, tuple[str, str]]] = {
    "common": "mpistrat.api.common",
    "common.exceptions": {"HorovodInternalError": ("mpistrat.core.errors", "CollectiveError"),
                          "HostsUpdatedInterrupt": ("mpistrat.api.elastic.state", "HostsUpdatedInterrupt")},
    "common.process_sets": "mpistrat.api.common",
    "tensorflow.functions": "mpistrat.tensorflow",
    "tensorflow.mpi_ops": "mpistrat.tensorflow",
    "tensorflow.sync_batch_norm": "mpistrat.tensorflow",
}
# The attributes of mpistrat are explained in missing_names; these are no attributes, or other ones.
_ABSENT = {"run": missing_names.RUNNER, "_keras": missing_names.INTERNAL + "The names are in mpistrat.keras.",
           "common.basics": missing_names.INTERNAL + "The queries are in mpistrat.",
           "common.elastic": "states and `run` are in mpistrat.tensorflow.elastic and mpistrat.keras.elastic.",
           "common.mpi_ops": missing_names.INTERNAL + "The collectives are in mpistrat.",
           "common.util": missing_names.INTERNAL + "gpu_available and the other queries are in mpistrat."}


def install() -> None:
    """Let Python's import know these paths."""
    missing_names.modules.update(_ROOT + name for name in _THERE)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
                  ) -> ModuleSpec | None:
        if not fullname.startswith(_ROOT):
            return None
        name = fullname.removeprefix(_ROOT)
        if name in _THERE:
            return ModuleSpec(fullname, _Loader(), is_package=any(each.startswith(f"{name}.") for each in _THERE))
        parent, _, last = fullname.rpartition(".")
        reason = _ABSENT.get(name) or missing_names.reason(parent, last)
        if reason:
            raise ModuleNotFoundError(f"No module named {fullname!r}: {reason}", name=fullname)
        return None


class _Loader(Loader):
    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__.removeprefix(_ROOT)
        names = _THERE[name]
        absent = missing_names.explain(module.__name__)

        def find(attribute: str) -> Any:
            if isinstance(names, str):
                return getattr(importlib.import_module(names), attribute)
            if attribute not in names:
                return absent(attribute)
            owner, its = names[attribute]
            return getattr(importlib.import_module(owner), its)

        module.__doc__ = f"Names of horovod.{name}."
        module.__getattr__ = find  # type: ignore[method-assign]
        vars(module)["__all__"] = list(vars(importlib.import_module(names))["__all__"] if isinstance(names, str)
                                       else names)
