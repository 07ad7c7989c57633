"""The differential harness: one program is trained with each backend, and must come to the same bits everywhere.

What a rank computes from gradients that are the same on all ranks is the same on all ranks, whatever reduced them. So
every program here is trained in several legs (legs.py): with the default backend, with MPI, as if the ranks stood on
several hosts, through the other door (MPIStrategy instead of Horovod's way, or the reverse), and compiled by XLA. After
each leg the weights, and the state of the optimizer, are compared among the ranks, and after the last one, with the
losses of each rank, among the legs. XLA computes a step with other rounding, so its legs are compared bit by bit among
themselves only.

`python -m tests.programs.differential --help` runs all of it; the table of programs a part.
"""
