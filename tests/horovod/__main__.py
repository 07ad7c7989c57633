"""Write docs/horovod-table.md."""

import sys

from .table import PAGE, ROWS, marked_tests, page, problems, read_rows

rows, tests = read_rows(ROWS.read_text()), marked_tests()
PAGE.write_text(page(rows, tests))
if wrong := problems(rows, tests):
    sys.exit("\n".join(wrong))
