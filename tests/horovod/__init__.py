"""The table of docs/horovod-table.md: what Horovod has, what mpistrat does, and the tests that prove it.

rows.py has the rows. A test names the rows that it proves with the marker `@pytest.mark.horovod("row", ...)`.
`python -m tests.horovod` writes the page; tests/unit/test_horovod_table.py fails when the page is not up to date.
"""
