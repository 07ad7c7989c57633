"""The trace among the ranks of a job: their clocks, and the status file."""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import mpistrat
from mpistrat.api import runtime
from mpistrat.trace import clocks
from mpistrat.trace.reports import status_directory


def test_ranks_of_one_host_read_one_clock() -> None:
    comm = runtime.current().comm
    if comm is None:
        pytest.skip("one rank without MPI")
    offsets = clocks.measure(comm)
    assert {rank: offset.at(time.monotonic_ns()) for rank, offset in offsets.items()} == dict.fromkeys(
        range(mpistrat.size()), 0)


def test_a_clock_that_is_shifted_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = runtime.current().comm
    if comm is None:
        pytest.skip("one rank without MPI")
    shift = 10**9 * mpistrat.rank()
    monkeypatch.setattr(clocks, "identity", lambda: f"clock of rank {mpistrat.rank()}")
    monkeypatch.setattr(clocks, "time", SimpleNamespace(monotonic_ns=lambda: time.monotonic_ns() + shift))
    offsets = clocks.measure(comm)
    errors = [offset.at(0) - 10**9 * rank for rank, offset in offsets.items()]
    print(f"errors of the clocks in us: {[error / 1000 for error in errors]}")
    assert offsets[0].at(0) == 0
    assert max(map(abs, errors)) < 5_000_000  # 100 us or less where no other process runs on the cores.


def test_the_status_file_has_all_ranks() -> None:
    own = f"{os.getpid()}"
    pid = mpistrat.broadcast_object(own, name="status.pid")
    limit = time.monotonic() + 60
    ranks: list[dict] = []
    is_done = False
    while not is_done:
        assert time.monotonic() < limit
        mpistrat.allreduce(np.ones(4), name="status.work")
        if mpistrat.rank() == 0:
            found = list(Path(status_directory(os.environ)).glob(f"*-{pid}.json"))
            ranks = json.loads(found[0].read_text())["ranks"] if found else []
        has_all = len(ranks) == mpistrat.size() and all(each["bytes"] for each in ranks)
        is_done = mpistrat.broadcast_object(has_all, name="status.done")
    if mpistrat.rank() == 0:
        assert [each["rank"] for each in ranks] == list(range(mpistrat.size()))
        for each in ranks:
            assert each["operations"] > 0 and each["rss_bytes"] > 0
            assert each["computing"] + each["waiting"] + each["moving"] == pytest.approx(1, abs=1e-3)
