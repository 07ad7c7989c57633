"""`import horovod` in a program that nobody edits: the names are those of mpistrat. See mpistrat/horovod/imports.py.

This package is found only by processes that have its directory on PYTHONPATH: those of `mpistrat run --as-horovod`, and
those of a shell that has evaluated `mpistrat as-horovod --env`.
"""

from mpistrat.horovod import imports

__version__ = imports.VERSION
__getattr__ = imports.install_horovod(__name__)
