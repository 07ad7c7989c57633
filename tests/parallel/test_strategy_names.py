"""strategy(name) on several ranks: what each name answers with, and what it refuses."""

import logging
from typing import Any

import pytest

tf = pytest.importorskip("tensorflow")

import mpistrat.tensorflow as hvd  # noqa: E402
from mpistrat.api import runtime  # noqa: E402


@pytest.mark.parametrize("name", ["mirrored", "multi_worker_mirrored", "central_storage"])
def test_a_synchronous_strategy_is_ours(name: str, size: int) -> None:
    strategy = hvd.strategy(name, random_per_rank=False)
    assert isinstance(strategy, hvd.MPIStrategy)
    assert strategy.num_replicas_in_sync == size
    assert strategy.extended.random_per_rank is False
    assert (strategy.extended.slots.owner == 0) == (name == "central_storage")


@pytest.mark.parametrize("name, jobs, text", [
    ("horovod", None, "strategy() takes one of the names mirrored, multi_worker_mirrored, central_storage, "
     "parameter_server, one_device, default, tpu. Received: 'horovod'"),
    ("tpu", None, "use tf.distribute.TPUStrategy"),
    ("one_device", None, "are for one rank. "), ("default", None, "Received: 2 ranks"),
    ("parameter_server", {"chief": 1, "evaluator": 1}, "strategy() does not start evaluators")])
def test_other_names_are_refused_on_every_rank(name: str, jobs: Any, text: str, size: int) -> None:
    with pytest.raises(ValueError) as caught:
        hvd.strategy(name, **{} if jobs is None else {"jobs": jobs})
    assert text.replace("2 ranks", f"{size} ranks") in str(caught.value)


# -- cross-device operations ------------------------------------------------------------------------------------------


def warned_of(caplog: pytest.LogCaptureFixture, operations: Any) -> str:
    with caplog.at_level(logging.WARNING, "mpistrat"):
        hvd.strategy("mirrored", cross_device_ops=operations)
    return " ".join(record.getMessage() for record in caplog.records if type(operations).__name__ in record.message)


def test_reduction_to_one_device_is_said_not_to_be_there(caplog: pytest.LogCaptureFixture, rank: int) -> None:
    text = warned_of(caplog, tf.distribute.ReductionToOneDevice())
    assert ("has no effect under MPI" in text) == (rank == 0)


def test_nccl_is_said_not_to_be_there_where_it_is_not(caplog: pytest.LogCaptureFixture, rank: int) -> None:
    text = warned_of(caplog, tf.distribute.NcclAllReduce())
    assert ("NCCL is not available" in text) == (rank == 0 and not hvd.nccl_built())


def test_hierarchical_reduction_is_what_is_done(caplog: pytest.LogCaptureFixture) -> None:
    text = warned_of(caplog, tf.distribute.HierarchicalCopyAllReduce())
    assert ("leaves out the stage" in text) == (runtime.current().settings.cpu_operations == "mpi" and hvd.rank() == 0)


# -- who is the chief -------------------------------------------------------------------------------------------------


def test_every_way_to_ask_for_the_chief_finds_the_first_rank(rank: int, size: int) -> None:
    resolver = hvd.MPIStrategy().cluster_resolver
    task_type, task_id, cluster = resolver.task_type, resolver.task_id, resolver.cluster_spec().as_dict()
    # As TensorFlow's tutorials ask: for Keras with workers only, and for a loop of one's own also with a chief.
    assert (task_type is None or (task_type == "worker" and task_id == 0)) == (rank == 0)
    assert (task_type == "chief" or ("chief" not in cluster and task_id == 0)) == (rank == 0)
    assert sum(len(tasks) for tasks in cluster.values()) == size
    extended = hvd.MPIStrategy().extended  # As Keras 2 and KerasTuner ask.
    assert (extended._task_type, extended._task_id) == (task_type, task_id) == ("worker", rank)
