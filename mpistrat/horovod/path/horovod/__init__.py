"""`import horovod` in a program that is not edited: it has the names of mpistrat. See mpistrat/horovod/__init__.py.

Only processes with the parent directory on PYTHONPATH find this package: processes of `mpistrat run --as-horovod`, and
of a shell that has evaluated `mpistrat as-horovod --env`.
"""

from mpistrat.horovod import VERSION, install_horovod

__version__ = VERSION
__getattr__ = install_horovod(__name__)
