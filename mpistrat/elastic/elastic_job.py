"""The description of an elastic job: ranks get it in an environment variable, and agents on stdin. No I/O."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ..process.launch_env import RUN_ELASTIC

LEAVE_CODE = 75  # EX_TEMPFAIL of sysexits.h: a rank ends so that the supervisor starts the next generation.


@dataclass(frozen=True)
class ElasticJob:
    """The description of an elastic job for its ranks and agents."""

    name: str  # A random name, which the names of the job's agents contain.
    secret: str  # The secret of the job. Only the user of the job can read the environment of its processes.
    generation: int  # The number of this generation, from 1.
    hosts: tuple[str, ...]  # Names and addresses of the supervisor's host.
    port: int  # The port at which the supervisor listens.
    checkpoint: str = ""  # The directory where the chief saves commits; "" for none.
    checkpoint_every: int = 0  # The chief saves each commit whose number is a multiple of this.
    # Generation and number of the newest commit when the generation starts; (0, 0) for none.
    newest: tuple[int, int] = (0, 0)
    stay_s: float = 0.0  # How long an agent stays that cannot reach the supervisor's host.

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> "ElasticJob":
        found = json.loads(text)
        return cls(**{**found, "hosts": tuple(found["hosts"]), "newest": tuple(found["newest"])})

    def variable(self) -> dict[str, str]:
        return {RUN_ELASTIC: self.to_text()}

    @property
    def key(self) -> bytes:
        return bytes.fromhex(self.secret)


def job_of(environ: Mapping[str, str]) -> ElasticJob | None:
    """Return the job that a rank's environment describes; None if the rank was started without --elastic."""
    text = environ.get(RUN_ELASTIC)
    return ElasticJob.from_text(text) if text else None
