"""Jobs that survive the loss of ranks and hosts: a supervisor outside of MPI, and an agent on each host.

`mpistrat run --elastic` is the supervisor. It starts a *generation*: one mpirun with its ranks. When a generation ends
before the training is done, the next one starts with the hosts that are left. What the ranks have committed outlives
them in the memory of a *agent*, one process per host that does not use MPI.

`plan` (with `hosts` and `generation`) and `agent_state` decide; time and messages are their arguments. `service`,
`agent` and `member` are thin shells around them, with sockets and processes: of the supervisor, of an agent, and of a
rank.
"""

from typing import NoReturn


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(f"mpistrat.elastic has no {name}: `run`, states and sampler of Horovod's elastic API are in "
                         "mpistrat.tensorflow.elastic and mpistrat.keras.elastic.")
