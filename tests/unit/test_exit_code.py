"""The exit code of the sys.exit() that ends a process is known at exit, and a sys.exit that is caught is not."""

import subprocess
import sys

import pytest

from mpistrat.process import exit_code

# The module needs nothing of the package, and so starts fast.
START = f"""
import atexit, importlib.util, sys, threading
spec = importlib.util.spec_from_file_location("exit_code", {exit_code.__file__!r})
exit_code = importlib.util.module_from_spec(spec)
spec.loader.exec_module(exit_code)
exit_code.note()
exit_code.note()
atexit.register(lambda: print(exit_code.final()))
"""


def run(script: str) -> tuple[int, list[str], str]:
    """Exit code, lines on stdout and text on stderr of a script; the last line is what is known at exit."""
    done = subprocess.run([sys.executable, "-c", START + script], capture_output=True, text=True, timeout=100)
    return done.returncode, done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize(("script", "code", "known"), [
    ("sys.exit(3)", 3, "(3, 'sys.exit(3)')"),
    ("sys.exit('no data')", 1, "(1, \"sys.exit('no data')\")"),
    ("sys.exit((1, 2))", 1, "(1, 'sys.exit((1, 2))')"),
    ("sys.exit(-1)", 255, "(255, 'sys.exit(-1)')"),
    ("try:\n    sys.exit(5)\nfinally:\n    pass", 5, "(5, 'sys.exit(5)')"),
    ("try:\n    sys.exit(5)\nexcept SystemExit as e:\n    e.code = 6\n    raise", 6, "(6, 'sys.exit(6)')"),
    ("sys.exit()", 0, "None"), ("sys.exit(0)", 0, "None"), ("sys.exit(256)", 0, "None"),
    ("try:\n    sys.exit(5)\nexcept SystemExit:\n    pass", 0, "None"),
    ("try:\n    sys.exit(5)\nexcept SystemExit:\n    pass\nsys.exit(0)", 0, "None"),
    ("try:\n    sys.exit(5)\nexcept SystemExit as e:\n    assert e.code == 5", 0, "None"),
    ("t = threading.Thread(target=sys.exit, args=[5]); t.start(); t.join()", 0, "None"),
    ("raise SystemExit(4)", 4, "None"),  # Python passes it to no hook.
    ("raise ValueError", 1, "None")])
def test_what_is_known_at_exit(script: str, code: int, known: str) -> None:
    returned, lines, errors = run(script)
    assert (returned, lines) == (code, [known])
    assert ("Traceback" in errors) == ("ValueError" in script)


def test_the_exception_is_like_that_of_python() -> None:
    code, lines, errors = run("""
import pickle
for arguments in [(3,), ("text",), ((1, 2),), (None,), ()]:
    try:
        sys.exit(*arguments)
    except SystemExit as error:
        again = pickle.loads(pickle.dumps(error))
        print(repr(error), error.code, error.args, type(again) is SystemExit, again.code == error.code)
""")
    assert code == 0 and not errors
    assert lines == ["SystemExit(3) 3 (3,) True True", "SystemExit('text') text ('text',) True True",
                     "SystemExit(1, 2) (1, 2) (1, 2) True True", "SystemExit() None () True True",
                     "SystemExit() None () True True", "None"]
