"""Jobs that survive the loss of ranks and hosts: a supervisor outside of MPI, and an agent on each host.

`mpistrat run --elastic` is the supervisor. It starts a *generation*: one mpirun with its ranks. If a generation ends
before the training is done, the next generation starts on the remaining hosts. An *agent*, a process without MPI on
each host, keeps the *commits* (copies of the training state) in memory, so the commits outlive the ranks.

`supervisor_plan` and the first part of `agent` make the decisions, without I/O. `service` and the second part of
`agent` have the sockets and threads, and carry out the decisions. `member` runs in each rank.
"""

from typing import NoReturn


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(f"mpistrat.elastic has no {name}: `run`, states and sampler of Horovod's elastic API are in "
                         "mpistrat.tensorflow.elastic and mpistrat.keras.elastic.")
