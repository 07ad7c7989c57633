"""Which of the tests that start jobs are `long`: all that are not marked as `quick`, and all on other than 2 ranks."""

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
