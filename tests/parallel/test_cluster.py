"""A cluster formed by all ranks of this session, which share a host, what does not make one, and strategy(name)."""

import logging
import socket
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import mpistrat
import mpistrat.tensorflow as hvd
from mpistrat.api import runtime
from mpistrat.cluster import Cluster, form
from mpistrat.core.errors import ClusterError, InvalidRequestError
from mpistrat.tensorflow import MPIClusterResolver

Form = Callable[..., Cluster]


def error_of(jobs: Any = None) -> str:
    """The text of the ClusterError that every rank gets, which is the same."""
    with pytest.raises(ClusterError) as caught:
        form(jobs)
    texts = mpistrat.allgather_object(str(caught.value))
    assert texts == [texts[0]] * len(texts)
    return texts[0]


# -- what is formed ---------------------------------------------------------------------------------------------------


def test_the_default_is_a_chief_and_workers(rank: int) -> None:
    cluster = form()
    assert (cluster.role.value, cluster.index) == (("worker", rank - 1) if rank else ("chief", 0))


def test_all_ranks_have_the_same_addresses_and_no_two_the_same_port(size: int) -> None:
    spec = form().spec
    assert mpistrat.allgather_object(spec) == [spec] * size
    addresses = [address for role in spec.values() for address in role]
    assert len(set(addresses)) == size
    assert all(address.startswith("localhost:") for address in addresses)


def test_each_rank_holds_its_own_port_until_it_closes_the_cluster(rank: int) -> None:
    cluster = form()
    port = int(cluster.spec[cluster.role.value][cluster.index].rpartition(":")[2])
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("", port))
    cluster.close()
    socket.create_server(("", port)).close()


def test_the_chief_cannot_wait_for_itself(rank: int) -> None:
    cluster = form()
    if rank == 0:
        with pytest.raises(InvalidRequestError, match="rank 0 is the chief"):
            cluster.wait_for_chief(0)


# -- roles that do not fit --------------------------------------------------------------------------------------------


def test_more_roles_than_ranks_say_how_many_ranks_they_need(size: int) -> None:
    assert f"need {size + 1} ranks, but there are {size} (mpirun -np {size + 1})" in \
        error_of({"chief": 1, "worker": size - 1, "ps": 1})


def test_jobs_that_differ_among_the_ranks_are_an_error_on_every_rank(rank: int, size: int) -> None:
    others = {"chief": 1, "worker": size - 1}
    last = {"chief": 1, "ps": size - 1}
    assert error_of(last if rank == size - 1 else others) == \
        f"the ranks pass different `jobs`: {others} on rank 0, {last} on rank {size - 1}."


def test_roles_in_another_order_are_those_of_the_chief(rank: int, size: int) -> None:
    if size < 3:
        pytest.skip("with two ranks there is one order")
    others = {"chief": 1, "ps": size - 2, "worker": 1}
    cluster = form(others if rank else {"chief": 1, "worker": 1, "ps": size - 2})
    assert mpistrat.allgather_object(cluster.spec) == [cluster.spec] * size
    assert mpistrat.allgather_object(cluster.role.value) == ["chief", "worker", *["ps"] * (size - 2)]


def test_jobs_that_are_wrong_on_one_rank_are_an_error_on_every_rank(rank: int, size: int) -> None:
    error = error_of({"chief": 1, "worker": size} if rank == 1 else None)
    assert error.startswith("ranks [1]: jobs ")


def test_after_an_error_a_cluster_can_be_formed(size: int) -> None:
    error_of({"worker": size})
    assert form().spec


def test_a_tf_config_of_the_platform_is_not_read(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setenv("TF_CONFIG", "{")
    assert form().role.value == ("worker" if rank else "chief")


# -- the resolver -----------------------------------------------------------------------------------------------------


def test_the_resolver_tells_tensorflow_of_the_cluster(rank: int, size: int) -> None:
    resolver = MPIClusterResolver()
    spec = resolver.cluster_spec()
    assert isinstance(resolver, tf.distribute.cluster_resolver.ClusterResolver)
    assert {job: spec.num_tasks(job) for job in spec.jobs} == {"chief": 1, "worker": size - 1}
    assert (resolver.task_type, resolver.task_id) == (("worker", rank - 1) if rank else ("chief", 0))
    assert resolver.master() == "grpc://" + spec.task_address(resolver.task_type, resolver.task_id)
    assert resolver.master("chief", 0, "https") == "https://" + spec.task_address("chief", 0)


def test_an_evaluator_is_not_in_the_cluster(size: int) -> None:
    resolver = MPIClusterResolver({"chief": 1, "evaluator": size - 1})
    assert resolver.cluster_spec().jobs == ["chief"]
    assert resolver.master("evaluator", 0) == ""


def test_accelerators_are_those_of_this_process_or_as_given() -> None:
    assert MPIClusterResolver().num_accelerators() == {"GPU": len(tf.config.get_visible_devices("GPU"))}
    assert MPIClusterResolver(num_accelerators={"GPU": 3}).num_accelerators("worker", 0) == {"GPU": 3}


def test_a_chief_and_an_evaluator_have_no_server_to_run(size: int) -> None:
    resolver = MPIClusterResolver({"chief": 1, "evaluator": size - 1})
    with pytest.raises(InvalidRequestError, match=r"a (chief|evaluator) has no server to run; serve\(\) is for"):
        resolver.serve()


def test_a_server_takes_the_port_that_is_held(rank: int) -> None:
    resolver = MPIClusterResolver()
    server = tf.distribute.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id)
    assert server.target == resolver.master().replace("127.0.0.1", "localhost")
    mpistrat.barrier()
    chief = resolver.cluster_spec().task_address("chief", 0).rpartition(":")[2]
    socket.create_connection(("127.0.0.1", int(chief)), 10).close()
    mpistrat.barrier()


# -- strategy(name): what each name answers with, and what it refuses --------------------------------------------------


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
    assert ("has no effect" in text) == (runtime.current().settings.cpu_operations == "mpi" and hvd.rank() == 0)


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
