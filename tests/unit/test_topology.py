"""Topology, roles and cluster specs, made from host lists."""

import json

import pytest

from mpistrat.core.roles import Role, assign_roles, cluster_spec
from mpistrat.core.topology import Topology, describe_by_rank, unique_hosts

EVEN = ("a", "a", "b", "b")
UNEVEN = ("a", "a", "a", "b", "c", "c")
INTERLEAVED = ("a", "b", "a", "b", "a")


def of_all(hosts: tuple[str, ...], name: str) -> list:
    """An attribute of the Topology of each rank."""
    return [getattr(Topology(rank, hosts), name) for rank in range(len(hosts))]


@pytest.mark.parametrize("hosts", [("a",), EVEN, UNEVEN, INTERLEAVED])
def test_size_is_the_number_of_ranks(hosts: tuple[str, ...]) -> None:
    assert of_all(hosts, "size") == [len(hosts)] * len(hosts)
    assert of_all(hosts, "host") == list(hosts)


@pytest.mark.parametrize(("hosts", "local_ranks", "local_sizes"), [
    (("a",), [0], [1]),
    (EVEN, [0, 1, 0, 1], [2, 2, 2, 2]),
    (UNEVEN, [0, 1, 2, 0, 0, 1], [3, 3, 3, 1, 2, 2]),
    (INTERLEAVED, [0, 0, 1, 1, 2], [3, 2, 3, 2, 3])])
def test_a_local_rank_counts_the_ranks_of_its_host(hosts: tuple[str, ...], local_ranks: list[int],
                                                   local_sizes: list[int]) -> None:
    assert of_all(hosts, "local_rank") == local_ranks
    assert of_all(hosts, "local_size") == local_sizes


@pytest.mark.parametrize(("hosts", "cross_ranks", "cross_sizes"), [
    (("a",), [0], [1]),
    (EVEN, [0, 0, 1, 1], [2, 2, 2, 2]),
    (UNEVEN, [0, 0, 0, 1, 2, 1], [3, 2, 1, 3, 3, 2]),
    (INTERLEAVED, [0, 1, 0, 1, 0], [2, 2, 2, 2, 1])])
def test_a_cross_rank_counts_the_hosts_that_have_its_local_rank(hosts: tuple[str, ...], cross_ranks: list[int],
                                                                cross_sizes: list[int]) -> None:
    assert of_all(hosts, "cross_rank") == cross_ranks
    assert of_all(hosts, "cross_size") == cross_sizes


def test_short_hosts_are_left_out_of_the_cross_ranks() -> None:
    assert Topology(1, UNEVEN).cross_ranks == (1, 5)
    assert Topology(3, UNEVEN).cross_ranks == (0, 3, 4)


@pytest.mark.parametrize(("hosts", "homogeneous"), [(("a",), True), (EVEN, True), (("a", "b", "a", "b"), True),
                                                    (UNEVEN, False), (INTERLEAVED, False)])
def test_hosts_are_homogeneous_when_they_have_equally_many_ranks(hosts: tuple[str, ...], homogeneous: bool) -> None:
    assert of_all(hosts, "is_homogeneous") == [homogeneous] * len(hosts)


def test_hosts_come_in_the_order_of_their_lowest_rank() -> None:
    assert Topology(0, ("z", "a", "z", "m")).hosts == ("z", "a", "m")


def test_the_ranks_of_a_host_come_in_order() -> None:
    topology = Topology(3, INTERLEAVED)
    assert topology.local_ranks == topology.ranks_on("b") == (1, 3)
    assert topology.ranks_on("a") == (0, 2, 4)
    assert topology.ranks_on("elsewhere") == ()


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_host_list_is_an_error(rank: int) -> None:
    with pytest.raises(ValueError, match=rf"rank {rank} is not in 0\.\.1"):
        Topology(rank, ("a", "a"))


def test_hosts_that_share_memory_keep_their_names() -> None:
    assert unique_hosts(["a", "a", "b"], [0, 0, 2]) == ("a", "a", "b")


def test_two_machines_of_one_name_are_two_hosts() -> None:
    assert unique_hosts(["box", "box", "box", "c"], [0, 1, 0, 3]) == ("box#0", "box#1", "box#0", "c")


def test_ranks_of_one_machine_that_do_not_share_memory_are_on_several_hosts() -> None:
    assert len(set(unique_hosts(["a", "a", "a"], [0, 1, 2]))) == 3


@pytest.mark.parametrize("size", [1, 2, 5])
def test_rank_0_is_the_chief_and_all_others_are_workers(size: int) -> None:
    assert assign_roles(size) == ((Role.CHIEF, 0), *((Role.WORKER, i) for i in range(size - 1)))


def test_jobs_are_given_out_in_their_order() -> None:
    assert assign_roles(6, {"chief": 1, "ps": 2, "worker": 2, "evaluator": 1}) == (
        (Role.CHIEF, 0), (Role.PS, 0), (Role.PS, 1), (Role.WORKER, 0), (Role.WORKER, 1), (Role.EVALUATOR, 0))


@pytest.mark.parametrize("jobs", [{}, {"worker": 2}, {"chief": 2}, {"chief": 0, "worker": 2}, {"worker": 1, "chief": 1},
                                  {"ps": 1, "chief": 1}])
def test_the_one_chief_is_rank_0(jobs: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="exactly one chief is needed, and it is rank 0"):
        assign_roles(2, jobs)


def test_an_empty_job_may_stand_before_the_chief() -> None:
    assert assign_roles(1, {"worker": 0, "chief": 1}) == ((Role.CHIEF, 0),)


def test_an_unknown_role_is_an_error_that_lists_the_roles() -> None:
    with pytest.raises(ValueError, match=r"unknown role 'master'; the roles are chief, worker, ps, evaluator\."):
        assign_roles(2, {"chief": 1, "master": 1})


def test_a_negative_count_is_an_error() -> None:
    with pytest.raises(ValueError, match="'worker' cannot have -1 ranks"):
        assign_roles(0, {"chief": 1, "worker": -1})


@pytest.mark.parametrize("size", [2, 4])
def test_jobs_that_do_not_add_up_say_how_many_ranks_they_need(size: int) -> None:
    with pytest.raises(ValueError, match=rf"need 3 ranks, but there are {size} \(mpirun -np 3\)"):
        assign_roles(size, {"chief": 1, "worker": 2})


def test_a_cluster_spec_names_every_rank_by_role_host_and_port() -> None:
    spec = cluster_spec(Topology(2, EVEN), [10, 11, 12, 13])
    assert spec == {"cluster": {"chief": ["a:10"], "worker": ["a:11", "b:12", "b:13"]},
                    "task": {"type": "worker", "index": 1}}


def test_only_the_task_of_a_cluster_spec_differs_among_ranks() -> None:
    specs = [cluster_spec(Topology(rank, UNEVEN), range(6)) for rank in range(6)]
    assert all(spec["cluster"] == specs[0]["cluster"] for spec in specs)
    assert [(spec["task"]["type"], spec["task"]["index"]) for spec in specs] == [
        ("chief", 0), *(("worker", i) for i in range(5))]


def test_an_evaluator_is_a_task_but_not_in_the_cluster() -> None:
    jobs = {"chief": 1, "worker": 1, "ps": 1, "evaluator": 1}
    specs = [cluster_spec(Topology(rank, EVEN), [1, 2, 3, 4], jobs) for rank in range(4)]
    assert specs[3] == {"cluster": {"chief": ["a:1"], "worker": ["a:2"], "ps": ["b:3"]},
                        "task": {"type": "evaluator", "index": 0}}
    assert specs[2]["task"] == {"type": "ps", "index": 0}


def test_ranks_of_one_host_need_no_name_service() -> None:
    spec = cluster_spec(Topology(0, ("a", "a")), [5, 6])
    assert spec["cluster"] == {"chief": ["localhost:5"], "worker": ["localhost:6"]}


def test_a_cluster_spec_is_json_as_tf_config_is() -> None:
    spec = cluster_spec(Topology(1, EVEN), [1, 2, 3, 4])
    assert json.loads(json.dumps(spec)) == spec


@pytest.mark.parametrize("ports", [[], [1], [1, 2, 3]])
def test_a_cluster_spec_needs_one_port_for_each_rank(ports: list[int]) -> None:
    with pytest.raises(ValueError, match=rf"one port for each of 2 ranks is needed\. Received: {len(ports)}\."):
        cluster_spec(Topology(0, ("a", "b")), ports)


def test_values_are_described_with_the_ranks_that_have_them() -> None:
    assert describe_by_rank([3, 4, 3, None]) == "3 on ranks [0, 2]; 4 on ranks [1]; None on ranks [3]"
    assert describe_by_rank(["go"] * 5, "ranks {ranks} {value}") == "ranks [0-4] go"
