"""The package `horovod` for programs that are not edited. mpistrat/horovod/__init__.py gives it the names of mpistrat.

Python finds this package only if the parent directory of the package is on PYTHONPATH. `mpistrat run --as-horovod`
adds the directory to PYTHONPATH for its ranks, and `mpistrat as-horovod --env` prints the shell line that adds it.
"""

from mpistrat.horovod import VERSION, install_horovod

__version__ = VERSION
__getattr__ = install_horovod(__name__)
