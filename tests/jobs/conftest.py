"""Which of the tests that start jobs are `long`.

Long are all that are not marked as `quick`, and all with a parameter `ranks` other than 2.
"""

import signal
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            ranks = item.callspec.params.get("ranks", 2) if hasattr(item, "callspec") else 2
            if item.get_closest_marker("quick") is None or ranks != 2:
                item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> None:
    """A shell makes commands in the background ignore Ctrl-C, and what they start inherits that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
