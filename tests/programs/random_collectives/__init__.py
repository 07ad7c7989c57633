"""Random programs of collectives in branches, loops and functions inside of each other, checked by numpy.

pieces.py and arrays.py draw them; in functions.py, strategy.py and sessions.py is how they run.

    mpistrat run -np 3 -- python -m tests.programs.random_collectives WAY PROGRAMS [FIRST] [OPTION ...]

WAY is functions, strategy or sessions. FIRST is the number of the first program; the same number is the same program.
There is one inter-op thread, so that a wait in a wrong place is seen. With "gpu" the tensors go the way of GPU tensors,
on a stand-in; with "hosts" two consecutive ranks are a host each. For "eager" see functions.py, for "gradients" and
"compiled" strategy.py.
"""
