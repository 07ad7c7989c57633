"""Log messages of a script that has not set up logging: which are printed, and that no handler is added unasked."""

import os
import re
import subprocess
import sys

import pytest

SCRIPT = """
import logging, os
import mpistrat
mpistrat.init()
mpistrat.shutdown()
print(len(logging.getLogger().handlers + logging.getLogger("mpistrat").handlers))
"""
WARNING = "mpistrat: HOROVOD_CYCLE_TIME is not read and has no counterpart."


def run(level: str, before: str = "") -> tuple[str, list[str]]:
    """The number of handlers after init() and shutdown(), and the lines on stderr."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI"))}
    environ |= {"HOROVOD_CYCLE_TIME": "1", **({"MPISTRAT_LOG_LEVEL": level} if level else {})}
    done = subprocess.run([sys.executable, "-c", before + SCRIPT], env=environ, capture_output=True, text=True,
                          timeout=60, check=True)
    return done.stdout.strip(), done.stderr.splitlines()


@pytest.mark.parametrize(("level", "lines"), [("", [WARNING]), ("warning", [WARNING]), ("error", [])])
def test_warnings_are_printed_without_a_handler(level: str, lines: list[str]) -> None:
    assert run(level) == ("0", lines)


def test_info_says_the_ranks_the_backends_and_the_end_each_with_the_rank() -> None:
    handlers, lines = run("info")
    assert handlers == "1"
    assert lines[0] == f"[mpistrat] WARNING {WARNING}"
    assert len(lines) == 5
    for line, text in zip(lines[1:], ["MPI is not used", "chief; local rank 0 of 1 on .*; 1 ranks on 1 hosts",
                                      "shutdown begins", "shut down in .* s, because all ranks"], strict=True):
        assert re.match(rf"\[mpistrat\] INFO rank 0: .*{text}", line)


def test_an_application_that_has_set_up_logging_gets_no_second_handler() -> None:
    handlers, lines = run("info", "import logging; logging.basicConfig(format='app: %(message)s')")
    assert handlers == "1"
    assert len(lines) == 5 and all(line.startswith("app: ") for line in lines)
