"""Names that only Horovod has. In mpistrat they raise an AttributeError with the reason and a replacement.

`explain` makes a module's __getattr__ function, which Python calls for names that the module lacks. For such a name
hasattr() returns False, and `from mpistrat... import NAME` raises ImportError.
"""

import difflib
import importlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

INTERNAL = "it is internal to Horovod. "
_PASSES = INTERNAL + "Pass backward_passes_per_step= to DistributedOptimizer."
RUNNER = "start ranks with `mpistrat run -np 2 python train.py`, with mpirun, or with mpistrat.run(function, np=2)."
_OWN_MODULE = "it is a module of its own. Write: import {0}"

EVERYWHERE = {
    "torch": "there is no binding for PyTorch. The collectives of `import mpistrat` take and return torch's tensors, "
             "see examples/torch_digits.py.",
    "mxnet": "there is no binding for MXNet. The collectives of `import mpistrat` take numpy arrays.",
    "spark": f"there is no integration with Spark; {RUNNER}",
    "ray": f"there is no integration with Ray; {RUNNER}",
    "runner": RUNNER,
    "mpi_lib": INTERNAL + "The collectives and queries are functions of this module.",
    "HorovodInternalError": "use mpistrat.CollectiveError.",
    "Mean": "use Average.",
    **dict.fromkeys(["gradient_aggregation", "gradient_aggregation_eager"], _PASSES),
    **dict.fromkeys(["check_extension", "check_installed_version"],
                    INTERNAL + "`mpistrat doctor` shows what this machine has."),
    "is_version_greater_equal_than": INTERNAL + "Compare versions with packaging.version.",
    **dict.fromkeys(["num_rank_is_power_2", "check_num_rank_power_of_2"],
                    INTERNAL + "Adasum itself checks the number of ranks."),
    "handle_average_backwards_compatibility": INTERNAL + "allreduce accepts op= or average=.",
    "split_list": INTERNAL + "Pass groups= to DistributedOptimizer.",
    "get_process_set_ids_and_ranks": INTERNAL + "Keep the ProcessSet objects that you register: "
                                                 "ProcessSet.process_set_id and ProcessSet.ranks.",
}
ARRAYS: Mapping[str, str] = {
    "tensorflow": _OWN_MODULE.format("mpistrat.tensorflow"),
    "keras": _OWN_MODULE.format("mpistrat.keras"),
    "data": "Horovod's data loaders are for PyTorch. mpistrat.shard(x, y) returns this rank's rows.",
}
_RUN = "use mpistrat.run(function, np=2), which starts a job. `mpistrat run -np 2 python train.py` starts a script."
TENSORFLOW: Mapping[str, str] = {
    "run": _RUN,
    "keras": _OWN_MODULE.format("mpistrat.tensorflow.keras"),
    "callbacks": "it is in mpistrat.keras.callbacks.",
    "load_model": "it is in mpistrat.keras.",
    "data": "use the data service of TensorFlow: start tf.data.experimental.service.DispatchServer and WorkerServer in "
            "the ranks, and read with tf.data.experimental.service.distribute, see examples/data_service_digits.py.",
    "util": INTERNAL + "The functions are in mpistrat.tensorflow.",
    **dict.fromkeys(["LocalGradientAggregationHelper", "LocalGradientAggregationHelperEager"], _PASSES),
    **dict.fromkeys(["refs_to_vars", "vars_to_refs"], INTERNAL + "TensorFlow 2 has no reference variables."),
}
KERAS: Mapping[str, str] = {
    "run": _RUN,
    "alltoall": "horovod.keras does not have it either. Use mpistrat.tensorflow.alltoall.",
    "grouped_allreduce": "horovod.keras does not have it either. Use mpistrat.tensorflow.grouped_allreduce.",
    "join": "it is in mpistrat.tensorflow. With DistributedOptimizer(..., uneven=\"join\") fit calls it.",
    "DistributedGradientTape": "it is in mpistrat.tensorflow.",
    "BroadcastGlobalVariablesHook": "it is for TensorFlow 1's sessions; use "
                                    "callbacks.BroadcastGlobalVariablesCallback(root_rank).",
}


_reasons: dict[str, Mapping[str, str]] = {}  # For each imported module, the reasons by name.
modules: set[str] = set()  # Paths of Horovod's modules, which are also attributes; see mpistrat/horovod.


def explain(module: str, absent: Mapping[str, str] | None = None) -> Callable[[str], Any]:
    """Return a `__getattr__` function for the module with the name `module`. Local.

    `absent`: The names of Horovod that this module does not have, each with a text: the reason and a replacement. The
    names in EVERYWHERE, which no module of mpistrat has, are added.
    """
    sentences = _reasons[module] = {**EVERYWHERE, **(absent or {})}

    def find(name: str) -> ModuleType:
        if f"{module}.{name}" in modules:
            return importlib.import_module(f"{module}.{name}")
        text = f"module {module!r} has no attribute {name!r}"
        if name in sentences:
            text += f": {sentences[name]}"
        elif not name.startswith("_"):
            found = vars(sys.modules[module])
            known = found.get("__all__") or [each for each, value in found.items()
                                             if not each.startswith("_") and not isinstance(value, ModuleType)]
            inner = {public: f"{each}.{public}" for each in known if isinstance(found.get(each), ModuleType)
                     for public in found[each].__all__ if public not in known}
            text += "".join(f". Did you mean {inner.get(near, near)}?"
                            for near in difflib.get_close_matches(name, [*known, *inner], 1))
        raise AttributeError(text)

    return find


def reason(module: str, name: str) -> str:
    """Return a text on why `module` lacks the Horovod name `name`, with a replacement; "" for other names. Local."""
    return _reasons.get(module, {}).get(name, "")
