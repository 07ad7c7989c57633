"""`import horovod` in a program that is not edited: it has the names of mpistrat. See mpistrat/horovod/imports.py.

Only processes with the parent directory on PYTHONPATH find this package: processes of `mpistrat run --as-horovod`, and
of a shell that has evaluated `mpistrat as-horovod --env`.
"""

from mpistrat.horovod import imports

__version__ = imports.VERSION
__getattr__ = imports.install_horovod(__name__)
