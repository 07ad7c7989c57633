"""Write the status of jobs as a text file for Prometheus' node exporter. Called by top_command.py."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.errors import LaunchError, MissingDependencyError
from ...core.install import pip_extra
from .status_files import JobStatus

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_LABELS = ("job", "rank", "host")


def require() -> None:
    """Raise MissingDependencyError if prometheus_client is not installed."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(f"--prometheus needs prometheus_client ({pip_extra('top')}).") from error


def write(jobs: Sequence[JobStatus], path: Path) -> None:
    """Write the file atomically: a reader sees the old file or the new file.

    Raises LaunchError: The file cannot be written.
    """
    from prometheus_client import CollectorRegistry, write_to_textfile
    from prometheus_client.registry import Collector

    class Jobs(Collector):
        def collect(self) -> "Iterator[Metric]":
            return _metrics(jobs)

    registry = CollectorRegistry()
    registry.register(Jobs())
    try:
        write_to_textfile(str(path), registry)
    except OSError as error:
        raise LaunchError(f"--prometheus {path}: {error.strerror}. Name a file in a directory to which you may write, "
                          "such as node_exporter's --collector.textfile.directory.") from None


def _metrics(jobs: Sequence[JobStatus]) -> "Iterator[Metric]":
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
    ranks = [([job.job, str(rank.rank), rank.host], rank) for job in jobs for rank in job.ranks]
    for name, text in (("steps", "Training steps."), ("rows", "Rows trained on."),
                       ("operations", "Collectives."), ("bytes", "Bytes of collectives.")):
        counter = CounterMetricFamily(f"mpistrat_{name}", text, labels=_LABELS)
        for labels, rank in ranks:
            value = getattr(rank, name)
            if value is not None:
                counter.add_metric(labels, value)
        yield counter
    share = GaugeMetricFamily("mpistrat_share", "Share of the last interval: computing, waiting for ranks, moving "
                              "bytes, hidden (waiting or moving in the backward pass).", labels=(*_LABELS, "what"))
    memory = GaugeMetricFamily("mpistrat_rss_bytes", "Memory of the process.", labels=_LABELS)
    written = GaugeMetricFamily("mpistrat_written_seconds", "Time of the last report of the rank.", labels=_LABELS)
    oldest = GaugeMetricFamily("mpistrat_oldest_outstanding_seconds", "The time that the rank has waited for its "
                               "oldest operation; 0 if it waits for none.", labels=_LABELS)
    for labels, rank in ranks:
        for what in ("computing", "waiting", "moving", "hidden"):
            share.add_metric([*labels, what], getattr(rank, what))
        memory.add_metric(labels, rank.rss_bytes)
        written.add_metric(labels, rank.written)
        oldest.add_metric(labels, max((each.since_s for each in rank.outstanding), default=0.0))
    yield from (share, memory, written, oldest)
