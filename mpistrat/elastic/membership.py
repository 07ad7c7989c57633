"""The Member of this rank, if the rank belongs to an elastic job. init() makes it, and states and callbacks use it.

The module of the Member and its dependencies are imported only in elastic jobs.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..process.launch_env import launched_rank
from .elastic_job import job_of

if TYPE_CHECKING:
    from .member import Member

_member: "Member | None" = None


def current() -> "Member | None":
    """The Member of this rank; None in a job without --elastic, and before init()."""
    return _member


def join(environ: Mapping[str, str]) -> None:
    """Connect to the agent of this host, and start an agent if there is none. Local. Further calls change nothing.

    Raises ElasticError: There is no agent, and no agent can be started.
    """
    global _member
    job = job_of(environ)
    if job is not None and _member is None:
        from .member import Member
        _member = Member(job, launched_rank(environ))
