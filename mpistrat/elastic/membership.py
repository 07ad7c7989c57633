"""Whether this rank belongs to an elastic job: its Member, which init() makes and the states and callbacks ask for.

The Member and all that it needs are imported in elastic jobs only.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..process.launch_env import launched_rank
from .elastic_job import job_of

if TYPE_CHECKING:
    from .member import Member

_member: "Member | None" = None


def current() -> "Member | None":
    """The connection of this rank to its agent; None in a job without --elastic, and before init()."""
    return _member


def join(environ: Mapping[str, str]) -> None:
    """Connect to the agent of this host, and start an agent if there is none. Local. Further calls change nothing.

    Raises ElasticError: There is no agent, and none can be started.
    """
    global _member
    job = job_of(environ)
    if job is not None and _member is None:
        from .member import Member
        _member = Member(job, launched_rank(environ))
