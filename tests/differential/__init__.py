"""The differential harness: one program is trained with each backend, and must come to the same bits everywhere.

What a rank computes from gradients that are the same on all ranks is the same on all ranks, whatever reduced them. So
every program here is trained in several legs (legs.py): with the default backend, with MPI, and as if the ranks stood
on several hosts. After each leg the weights, and the state of the optimizer, are compared among the ranks, and after
the last one, with the losses of each rank, among the legs.

`python -m tests.differential --help` runs all of it; tests/parallel/test_differential.py a part.
"""
