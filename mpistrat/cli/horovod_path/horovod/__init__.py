"""`import horovod` in a program that nobody edits: the names are those of mpistrat. See mpistrat/api/as_horovod.py.

This package is found only by processes that have its directory on PYTHONPATH: those of `mpistrat run --as-horovod`, and
those of a shell that has evaluated `mpistrat as-horovod --env`.
"""

from mpistrat.api import as_horovod

__version__ = as_horovod.VERSION
__getattr__ = as_horovod.install(__name__)
