"""The cases, the figures and the output of `mpistrat bench`."""

import json
import math
import re
from pathlib import Path

import pytest

from mpistrat.cli.bench import command
from mpistrat.cli.bench.cases import CASES, SINGLE, bytes_of
from mpistrat.cli.bench.measure import Point, repeats_for, table
from mpistrat.core.errors import MpistratError
from mpistrat.core.install import pip_extra


def point(**changes: object) -> Point:
    """A point of round figures."""
    values: dict = {"case": "1GB", "tensors": 1, "nbytes": 10**9, "ranks": 4, "seconds": 0.5, "mpi_s": 1.0,
                    "copy_s": 0.125, **changes}
    return Point(**values)


@pytest.mark.parametrize(("name", "tensors", "parameters"), [
    ("1KB", 1, 256), ("64MB", 1, 2**24), ("400x1KB", 400, 102_400), ("resnet50", 161, 25_557_032),
    ("bert", 199, 109_482_240)])
def test_the_cases_have_the_networks_numbers_of_parameters(name: str, tensors: int, parameters: int) -> None:
    assert len(CASES[name]) == tensors
    assert bytes_of(CASES[name]) == 4 * parameters


def test_the_names_of_single_arrays_say_their_size() -> None:
    units = {"KB": 2**10, "MB": 2**20}
    assert SINGLE == ("1KB", "64KB", "1MB", "16MB", "64MB")
    assert all(bytes_of(CASES[name]) == int(name[:-2]) * units[name[-2:]] for name in SINGLE)


@pytest.mark.parametrize(("ranks", "gigabytes_per_second"), [(1, 0), (2, 2), (4, 3), (1000, 3.996)])
def test_bus_bandwidth_is_what_each_link_carries(ranks: int, gigabytes_per_second: float) -> None:
    assert math.isclose(point(ranks=ranks).bus_bandwidth, gigabytes_per_second * 1e9)


def test_the_table_is_aligned() -> None:
    lines = table([point(), point(case="small", nbytes=4, seconds=1e-4, mpi_s=None)]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[1].split() == ["1GB", "1", "1,000,000,000", "500.000", "3.00", "0.50", "4.0"]
    assert lines[2].split() == ["small", "1", "4", "0.100", "0.00", "-", "0.0"]


def test_large_cases_are_repeated_a_few_times_and_small_ones_not_for_ever() -> None:
    assert [repeats_for(nbytes) for nbytes in (0, 1024, 2**25, 2**33)] == [200, 200, 44, 5]


@pytest.mark.parametrize(("argv", "text"), [
    (["2KB"], "'2KB' is not a case; there are: 1KB, 64KB"), (["--repeats", "0"], "a number from 1 is needed"),
    (["--train", "--models", "vgg"], "invalid choice: 'vgg'"), (["--batch", "x"], "a number from 1 is needed")])
def test_wrong_input_is_named(argv: list[str], text: str) -> None:
    with pytest.raises(MpistratError, match=text):
        command.main(argv)


def test_a_missing_matplotlib_is_named_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpistrat.cli.bench.plot.find_spec", lambda name: None)
    with pytest.raises(MpistratError, match=re.escape(pip_extra("plot"))):
        command.main(["--plot", "figure.png"])


def test_a_prediction_reaches_to_16384_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = tmp_path / "points.json"
    points.write_text(json.dumps([{"nbytes": n, "seconds": 1e-4 + n / 4e9, "tensors": 1} for n in (1e3, 1e6, 1e8)]))
    assert command.main(["--predict", str(points), "--step-ms", "100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("fitted: 100 us + bytes / 4.00 GB/s in a host")
    assert lines[1].split() == ["1", "ranks", "0.0", "ms", "100.0%"]
    assert lines[-1].split()[:2] == ["16384", "ranks"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '[{"nbytes": 1}]'])
def test_a_file_that_holds_no_points_is_refused(text: str, tmp_path: Path) -> None:
    points = tmp_path / "points.json"
    points.write_text(text)
    with pytest.raises(MpistratError, match="not the points of a job of several ranks"):
        command.main(["--predict", str(points)])
