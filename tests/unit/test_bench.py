"""The cases, the figures and the output of `mpistrat bench`."""

import io
import math
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mpistrat.cli import bench
from mpistrat.core.errors import MpistratError
from mpistrat.core.install import pip_extra
from mpistrat.process import procfs


def point(**changes: object) -> bench.Point:
    values: dict = {"case": "1GB", "operation": "allreduce", "tensors": 1, "nbytes": 10**9, "ranks": 4,
                    "mpistrat_s": 0.5, "mpi_s": 1.0, "memcpy_s": 0.125, "hidden": 0.755,
                    **changes}
    return bench.Point(**values)


@pytest.mark.parametrize(("name", "tensors", "parameters"), [
    ("1KB", 1, 256), ("64MB", 1, 2**24), ("400x1KB", 400, 102_400), ("resnet50", 161, 25_557_032),
    ("bert", 199, 109_482_240)])
def test_the_cases_have_the_networks_numbers_of_parameters(name: str, tensors: int, parameters: int) -> None:
    assert len(bench.CASES[name].shapes) == tensors
    assert bench.CASES[name].nbytes == 4 * parameters


@pytest.mark.parametrize(("ranks", "gigabytes_per_second"), [(1, 0), (2, 2), (4, 3), (1000, 3.996)])
def test_bus_bandwidth_is_what_each_link_carries(ranks: int, gigabytes_per_second: float) -> None:
    assert math.isclose(point(ranks=ranks).bus_bytes_per_s, gigabytes_per_second * 1e9)
    assert math.isclose(point(ranks=ranks, operation="alltoall").bus_bytes_per_s, gigabytes_per_second * 0.5e9)


def test_the_table_is_aligned_with_rows_that_come_one_by_one() -> None:
    table = bench.Table({"1GB": bench.Case([(2**28,)]), "small": bench.Case([(1,)])})
    titles = table.header()
    rows = [table.row(point()), table.row(point(case="small", nbytes=4, mpistrat_s=1e-4, mpi_s=None, hidden=None)),
            table.row(point(mpi_s=0.1))]
    assert len({len(line) for line in (titles, *rows)}) == 1
    assert titles.split() == ["case", "tensors", "bytes", "ms", "MPI", "ms", "memcpy", "ms", "bus", "GB/s", "hidden",
                              "against", "MPI"]
    assert rows[0].split() == ["1GB", "1", "1,000,000,000", "500.000", "1000.000", "125.000", "3.00", "76%", "2.0x",
                               "faster"]
    assert rows[1].split() == ["small", "1", "4", "0.100", "-", "125.000", "0.00", "-", "-"]
    assert rows[2].split()[-2:] == ["5.0x", "slower"]


def test_busy_cores_are_told_at_first(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 1000.0, 0.0))
    monkeypatch.setattr(bench, "physical_cores", lambda cpus: [0] * (3 if len(cpus) == os.cpu_count() else 1))
    monkeypatch.setattr(bench, "measure", lambda *of: pytest.fail("it was measured"))
    with pytest.raises(MpistratError):
        bench.main(["1KB", "--json", "."])
    monkeypatch.setattr(bench, "measure", lambda name, *of: point(case=name, ranks=1, mpi_s=None))
    assert bench.main(["1KB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"mpistrat bench: on \S+ other processes use the cores: .* 1000\.0 on 3 cores", lines[0])


def test_the_file_says_the_same_as_the_table() -> None:
    written = point().as_json()
    assert (written["mpistrat_s"], written["mpi_s"], written["memcpy_s"]) == (0.5, 1.0, 0.125)
    assert (written["times_as_long_as_mpi"], written["times_as_long_as_memcpy"]) == (0.5, 4.0)
    assert point(mpi_s=None).as_json()["times_as_long_as_mpi"] is None


def test_large_cases_are_repeated_a_few_times_and_small_ones_not_for_ever() -> None:
    assert [bench.repeats_for(nbytes) for nbytes in (0, 1024, 2**25, 2**33)] == [200, 200, 44, 5]


def test_a_slow_machine_repeats_a_case_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    monkeypatch.setattr(bench, "_seconds", lambda action, count: counts.append(count) or [0.5] * count)
    assert bench._median(lambda: None, None, 4) == 0.5
    assert bench._median(lambda: None, 70, 4) == 0.5
    assert [count for count in counts if count != bench._WARM_UP] == [6, 70]


def figures(*points: bench.Point, path: Path) -> Any:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pyplot, "close", lambda figure: None)
        bench.plot(points, str(path), "a title")
    figure = pyplot.gcf()
    pyplot.close(figure)
    return figure


def test_the_plot_joins_single_tensors_only_and_names_what_it_is_compared_with(tmp_path: Path) -> None:
    cases = [point(case="1KB", nbytes=2**10, mpistrat_s=1e-4, mpi_s=5e-5, memcpy_s=1e-6),
             point(case="16MB", nbytes=2**24, mpistrat_s=8e-3, mpi_s=1e-2, memcpy_s=3e-3),
             point(case="resnet50", tensors=161, nbytes=102_228_128, mpistrat_s=5e-2, mpi_s=7e-2, memcpy_s=2e-2)]
    figure = figures(*cases, path=tmp_path / "plot.png")
    rates, ratios = figure.axes
    lines = {line.get_label(): line for line in rates.lines}
    assert list(lines["mpistrat, one tensor"].get_xdata()) == [2**10, 2**24]
    assert list(lines["mpistrat, a group of tensors"].get_xdata()) == [102_228_128]
    assert lines["mpistrat, a group of tensors"].get_linestyle() == "None"
    assert len(lines["for comparison: MPI_Allreduce"].get_xdata()) == 3
    assert len(lines["for comparison: memcpy"].get_xdata()) == 3
    assert {text.get_text() for text in rates.texts} == {"resnet50\n(161 tensors)"}
    assert ratios.get_ylabel() == "times as long as\nMPI_Allreduce"
    shown = [label.get_text() for label in ratios.get_xticklabels()]
    assert {"1 KB", "64 KB", "1 MB", "16 MB"} <= set(shown)
    assert {"10 MB/s", "100 MB/s", "1 GB/s", "10 GB/s"} <= {label.get_text() for label in rates.get_yticklabels()}


def test_bytes_have_units_and_a_ratio_below_one_is_a_fraction() -> None:
    assert [bench.ratio_text(ratio) for ratio in (1 / 128, 0.5, 1, 16)] == ["1/128", "1/2", "1", "16"]
    assert [bench.binary_text(value) for value in (1, 1000, 2**16, 10**8)] == ["1 B", "1e+03 B", "64 KB", "95.4 MB"]
    assert [bench.decimal_text(value) for value in (1, 1000, 2**16, 10**8)] == [
        "1 B/s", "1 KB/s", "65.5 KB/s", "100 MB/s"]


def test_the_plot_of_one_rank_has_no_ratio_to_mpi(tmp_path: Path) -> None:
    figure = figures(point(ranks=1, mpi_s=None), path=tmp_path / "plot.svg")
    axes, = figure.axes
    assert axes.get_xlabel() == "bytes on each rank"
    assert len(axes.lines) == 2


def test_a_row_is_printed_once_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    printed = []

    def measured(name: str, *rest: object) -> bench.Point:
        printed.append(capsys.readouterr().out)
        return point(case=name, ranks=1, mpi_s=None)

    monkeypatch.setattr(bench, "measure", measured)
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    assert bench.main(["1KB", "64KB"]) == 0
    assert printed[0].startswith(
        "1 rank on 1 host, local. 4 measurements, most of them within 3 s, so at most about 1 minute\n")
    assert [line.split()[0] for line in printed[1].splitlines()] == ["1KB"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    pytest.importorskip("rich")
    monkeypatch.setattr("sys.stdout", found := Terminal())
    monkeypatch.setattr(bench, "launcher_here", lambda environ: None)
    monkeypatch.setenv("TERM", "xterm")
    return found


def test_a_bar_on_a_terminal_and_plain_text_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    on_terminal(monkeypatch)
    assert bench.Output(3, is_chief=True).bar is not None
    assert bench.Output(3, is_chief=False).bar is None
    monkeypatch.setenv("TERM", "dumb")
    assert bench.Output(3, is_chief=True).bar is None
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    assert bench.Output(3, is_chief=True).bar is None


def test_the_pty_of_a_rank_is_no_terminal_unless_its_launchers_output_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    on_terminal(monkeypatch)
    reader, writer = os.pipe()
    device, screen = os.openpty()
    try:
        for stdout, expected in ((writer, False), (screen, True)):
            with subprocess.Popen(["sleep", "60"], stdout=stdout) as launcher:
                process = procfs.find(launcher.pid)
                monkeypatch.setattr(bench, "launcher_here", lambda environ, found=process: found)
                assert bench.has_terminal({"TERM": "xterm"}) is expected
                launcher.kill()
        assert not bench.has_terminal({"TERM": "xterm"})  # The launcher has ended.
    finally:
        for descriptor in (reader, writer, device, screen):
            os.close(descriptor)


def test_lines_stand_above_the_bar_and_the_cursor_is_never_left_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    with bench.Output(2, is_chief=True) as bar:
        bar.begin("1KB: mpistrat")
        assert "0/2" in terminal.getvalue() and "1KB: mpistrat" in terminal.getvalue()
        assert terminal.getvalue().rindex("\x1b[?25h") > terminal.getvalue().rindex("\x1b[?25l")
        bar.line("[bold]a row[/bold] 1:2")  # neither marked up nor highlighted
        assert "[bold]a row[/bold] 1:2\n" in terminal.getvalue()
        bar.begin("1KB: memcpy")
        assert "1/2" in terminal.getvalue()


@pytest.mark.parametrize(("arguments", "has_matplotlib", "text"), [
    (["2KB"], True, "'2KB' is not a case. The cases are: 1KB, 64KB"),
    (["--repeats", "0"], True, "a whole number of at least 1"),
    (["--plot", "figure.png"], False, re.escape(pip_extra("bench"))),
    (["alltoall-1KB", "--plot", "figure.png"], True, "no chosen case is an all-reduce"),
    (["1KB", "--plot", "figure.gif"], True, "figure.gif: the name must end with .png, .svg, .pdf"),
    (["1KB", "--plot", "/no/such/folder/figure.png"], True, "figure.png cannot be written: No such file or directory"),
    (["1KB", "--json", "."], True, r"\. cannot be written: Is a directory")])
def test_wrong_input_is_named_before_anything_is_measured(
        arguments: list[str], has_matplotlib: bool, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpistrat.cli.bench.find_spec", lambda name: object() if has_matplotlib else None)
    monkeypatch.setattr(bench, "measure", lambda *of: pytest.fail("it was measured"))
    with pytest.raises(MpistratError, match=text):
        bench.main(arguments)
