"""docs/horovod-table.md: it is up to date, and each row has a test or a reason. What the markers must be."""

import pytest

from ..horovod.table import PAGE, ROWS, Marked, marked_tests, page, problems, read_markers, read_rows

TWO_ROWS = "Prose | with a bar.\n\n# First\none | has `a` | same\n\n# Second\ntwo | has b | no: not needed\n"


def test_the_page_is_up_to_date_and_each_row_has_a_test_or_a_reason() -> None:
    rows, marked = read_rows(ROWS.read_text()), marked_tests()
    assert problems(rows, marked) == []
    assert [row.name for row in rows if "not yet" in row.ours] == []
    assert PAGE.read_text() == page(rows, marked), "run python -m tests.horovod"


def test_what_is_wrong_is_named() -> None:
    rows = read_rows(TWO_ROWS)
    test = Marked("tests/unit/test_a.py", "test_b", ("two", "three"))
    assert problems(rows, [test]) == [
        "tests/unit/test_a.py::test_b names a row that does not exist: three",
        "one: no test proves it; mark one, or write why it is left out", "two: is left out, but a test proves it"]
    assert problems(rows, [Marked("tests/unit/test_a.py", "test_b", ("one",))]) == []


def test_the_page_has_a_table_for_each_section() -> None:
    made = page(read_rows(TWO_ROWS), [Marked("tests/unit/a.py", "test_b", ("one",)),
                                      Marked("tests/jobs/b.py", "test_c", ("one",))])
    assert made.endswith("""
## First

| Horovod | mpistrat | test |
|---|---|---|
| has `a` | same | [unit/a.py::test_b](../tests/unit/a.py)<br>[jobs/b.py::test_c](../tests/jobs/b.py) |

## Second

| Horovod | mpistrat | test |
|---|---|---|
| has b | no: not needed |  |
""")


def test_markers_are_read_from_functions_and_methods() -> None:
    source = """
@pytest.mark.horovod("one", "two")
@pytest.mark.parametrize("x", [1])
def test_a(x): pass

@pytest.mark.nightly
def test_b(): pass

class TestC:
    @pytest.mark.horovod("three")
    def test_d(self): pass
"""
    assert read_markers("tests/test_e.py", source) == [
        Marked("tests/test_e.py", "test_a", ("one", "two")), Marked("tests/test_e.py", "TestC::test_d", ("three",))]


@pytest.mark.parametrize("source", [
    "@pytest.mark.horovod('one')\ndef helper(): pass",
    "pytestmark = pytest.mark.horovod('one')",
    "def outer():\n    @pytest.mark.horovod('one')\n    def test_a(): pass",
    "@pytest.mark.parametrize('x', [pytest.param(1, marks=pytest.mark.horovod('one'))])\ndef test_a(x): pass",
    "@pytest.mark.horovod()\ndef test_a(): pass", "@pytest.mark.horovod(NAME)\ndef test_a(): pass",
    "@pytest.mark.horovod('one', row='two')\ndef test_a(): pass"])
def test_a_marker_that_is_not_on_a_test_or_names_no_row_is_an_error(source: str) -> None:
    with pytest.raises(ValueError, match=r"tests/test_e.py: .*(is not on a test function|does not name rows)"):
        read_markers("tests/test_e.py", source)


def test_a_test_is_in_a_file_that_pytest_collects() -> None:
    with pytest.raises(ValueError, match="is not on a test function"):
        read_markers("tests/support/helpers.py", "@pytest.mark.horovod('one')\ndef test_a(): pass")


@pytest.mark.parametrize("text", ["# A\none | has a", "# A\none | has a | same | more", "# A\none |  | same",
                                  "# A\none | a | same\none | b | same"])
def test_a_malformed_row_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"not `name \||two rows are called one"):
        read_rows(text)
