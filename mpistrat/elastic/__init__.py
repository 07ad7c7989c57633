"""Jobs that survive the loss of ranks and hosts: a supervisor outside of MPI, and an agent on each host.

`mpistrat run --elastic` is the supervisor. It starts a *generation*: one mpirun with its ranks. When a generation ends
before the training is done, the next generation starts on the remaining hosts. The commits of the ranks outlive the
ranks in the memory of an *agent*, a process without MPI on each host.

`supervisor_plan` and the first part of `agent` make the decisions, with time and messages as arguments. `service` and
the rest of `agent` add the sockets and processes of the supervisor and of an agent. `member` runs in each rank.
"""

from typing import NoReturn


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(f"mpistrat.elastic has no {name}: `run`, states and sampler of Horovod's elastic API are in "
                         "mpistrat.tensorflow.elastic and mpistrat.keras.elastic.")
