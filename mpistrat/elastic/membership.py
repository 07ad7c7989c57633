"""The Member (see `member`) of this rank in an elastic job. init() creates it, and elastic states and callbacks use it.

The module `member` and its dependencies are imported only in elastic jobs.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..process.launch_env import launched_rank
from .elastic_job import job_of

if TYPE_CHECKING:
    from .member import Member

_member: "Member | None" = None


def current() -> "Member | None":
    """Return the Member of this rank; None in a job without --elastic, and before init()."""
    return _member


def join(environ: Mapping[str, str]) -> None:
    """In an elastic job, connect to the agent of this host, and start it if necessary. Local. Later calls do nothing.

    Raises ElasticError: There is no agent, and no agent can be started.
    """
    global _member
    job = job_of(environ)
    if job is not None and _member is None:
        from .member import Member
        _member = Member(job, launched_rank(environ))
