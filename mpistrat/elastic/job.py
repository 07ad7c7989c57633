"""What the supervisor tells the ranks and the keepers about the job, in one environment variable. Pure."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ..process.launch_env import RUN_ELASTIC


@dataclass(frozen=True)
class ElasticJob:
    """An elastic job, as its processes know it.

    Attributes:
        name: Random; the name of the job's keepers.
        secret: Of the job; only the user who runs it can read the environment of its processes.
        generation: The number of this generation, from 1.
        hosts: Names and addresses of the supervisor's host.
        port: Where the supervisor listens.
        checkpoint: The directory where the chief saves commits; "" for none.
        checkpoint_every: Commits between two of these.
    """

    name: str
    secret: str
    generation: int
    hosts: tuple[str, ...]
    port: int
    checkpoint: str = ""
    checkpoint_every: int = 0

    def variable(self) -> dict[str, str]:
        """The environment variable for the ranks."""
        return {RUN_ELASTIC: json.dumps(asdict(self))}

    @property
    def key(self) -> bytes:
        """The secret as bytes."""
        return bytes.fromhex(self.secret)


def job_of(environ: Mapping[str, str]) -> ElasticJob | None:
    """The job of a rank with this environment; None if it was started without --elastic."""
    text = environ.get(RUN_ELASTIC)
    if not text:
        return None
    found = json.loads(text)
    return ElasticJob(**{**found, "hosts": tuple(found["hosts"])})
