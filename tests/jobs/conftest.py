"""What all tests of jobs need."""

import signal

import pytest


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> None:
    """A shell makes commands in the background ignore Ctrl-C, and what they start inherits that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
