"""Topology, roles and cluster specs, made from host lists."""

import pytest

from mpistrat.core.roles import Role, assign_roles, cluster_spec
from mpistrat.core.topology import Topology, describe_by_rank, describe_ranks, describe_wait, unique_hosts

EVEN = ("a", "a", "b", "b")
UNEVEN = ("a", "a", "a", "b", "c", "c")
INTERLEAVED = ("a", "b", "a", "b", "a")


def of_all(hosts: tuple[str, ...], name: str) -> list:
    return [getattr(Topology(rank, hosts), name) for rank in range(len(hosts))]


@pytest.mark.parametrize(("hosts", "is_homogeneous", "local_ranks", "local_sizes", "cross_ranks", "cross_sizes"), [
    (("a",), True, [0], [1], [0], [1]),
    (EVEN, True, [0, 1, 0, 1], [2, 2, 2, 2], [0, 0, 1, 1], [2, 2, 2, 2]),
    (("a", "b", "a", "b"), True, [0, 0, 1, 1], [2, 2, 2, 2], [0, 1, 0, 1], [2, 2, 2, 2]),
    (UNEVEN, False, [0, 1, 2, 0, 0, 1], [3, 3, 3, 1, 2, 2], [0, 0, 0, 1, 2, 1], [3, 2, 1, 3, 3, 2]),
    (INTERLEAVED, False, [0, 0, 1, 1, 2], [3, 2, 3, 2, 3], [0, 1, 0, 1, 0], [2, 2, 2, 2, 1])])
def test_a_rank_knows_its_place_on_its_host_and_among_the_hosts(
        hosts: tuple[str, ...], is_homogeneous: bool, local_ranks: list[int], local_sizes: list[int],
        cross_ranks: list[int], cross_sizes: list[int]) -> None:
    assert of_all(hosts, "size") == [len(hosts)] * len(hosts)
    assert of_all(hosts, "host") == list(hosts)
    assert of_all(hosts, "local_rank") == local_ranks
    assert of_all(hosts, "local_size") == local_sizes
    assert of_all(hosts, "cross_rank") == cross_ranks  # Hosts with fewer ranks are left out.
    assert of_all(hosts, "cross_size") == cross_sizes
    assert of_all(hosts, "is_homogeneous") == [is_homogeneous] * len(hosts)


def test_hosts_and_their_ranks_come_in_order() -> None:
    assert Topology(0, ("z", "a", "z", "m")).hosts == ("z", "a", "m")
    topology = Topology(3, INTERLEAVED)
    assert topology.local_ranks == topology.ranks_on("b") == (1, 3)
    assert topology.ranks_on("elsewhere") == ()


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_host_list_is_an_error(rank: int) -> None:
    with pytest.raises(ValueError, match=rf"rank {rank} is not in 0\.\.1"):
        Topology(rank, ("a", "a"))


def test_two_machines_of_one_name_are_two_hosts_unless_they_share_memory() -> None:
    assert unique_hosts(["box", "box", "box", "c"], [0, 1, 0, 3]) == ("box#0", "box#1", "box#0", "c")


@pytest.mark.parametrize(("size", "jobs", "roles"), [
    (1, None, [(Role.CHIEF, 0)]), (3, None, [(Role.CHIEF, 0), (Role.WORKER, 0), (Role.WORKER, 1)]),
    (4, {"worker": 0, "chief": 1, "ps": 2, "evaluator": 1}, [
        (Role.CHIEF, 0), (Role.PS, 0), (Role.PS, 1), (Role.EVALUATOR, 0)])])
def test_jobs_are_given_out_in_their_order(size: int, jobs: dict[str, int] | None,
                                           roles: list[tuple[Role, int]]) -> None:
    assert list(assign_roles(size, jobs)) == roles


@pytest.mark.parametrize(("jobs", "text"), [
    *((jobs, "exactly one chief is needed, and it is rank 0") for jobs in (
        {}, {"worker": 2}, {"chief": 2}, {"chief": 0, "worker": 2}, {"worker": 1, "chief": 1}, {"ps": 1, "chief": 1})),
    ({"chief": 1, "master": 1}, r"unknown role 'master'; the roles are chief, worker, ps, evaluator\."),
    ({"chief": 1, "worker": -1}, "'worker' cannot have -1 ranks"),
    ({"chief": 1, "worker": 2}, r"need 3 ranks, but there are 2 \(mpirun -np 3\)"),
    ({"chief": 1}, r"need 1 ranks, but there are 2 \(mpirun -np 1\)")], ids=str)
def test_jobs_that_are_none_are_errors(jobs: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        assign_roles(2, jobs)


@pytest.mark.parametrize(("rank", "hosts", "jobs", "cluster", "task"), [
    (2, EVEN, None, {"chief": ["a:1"], "worker": ["a:2", "b:3", "b:4"]}, ("worker", 1)),
    (3, EVEN, {"chief": 1, "worker": 1, "ps": 1, "evaluator": 1}, {
        "chief": ["a:1"], "worker": ["a:2"], "ps": ["b:3"]}, ("evaluator", 0)),  # It is not in the cluster.
    (0, ("a", "a"), None, {"chief": ["localhost:1"], "worker": ["localhost:2"]}, ("chief", 0))])
def test_a_cluster_spec_names_every_rank_by_role_host_and_port(
        rank: int, hosts: tuple[str, ...], jobs: dict[str, int] | None, cluster: dict[str, list[str]],
        task: tuple[str, int]) -> None:
    assert cluster_spec(Topology(rank, hosts), range(1, 1 + len(hosts)), jobs) == {
        "cluster": cluster, "task": {"type": task[0], "index": task[1]}}


@pytest.mark.parametrize("ports", [[], [1], [1, 2, 3]])
def test_a_cluster_spec_needs_one_port_for_each_rank(ports: list[int]) -> None:
    with pytest.raises(ValueError, match=rf"one port for each of 2 ranks is needed\. Received: {len(ports)}\."):
        cluster_spec(Topology(0, ("a", "b")), ports)


def test_values_are_described_with_the_ranks_that_have_them() -> None:
    assert describe_by_rank([3, 4, 3, None]) == "3 on ranks [0, 2]; 4 on ranks [1]; None on ranks [3]"
    assert describe_by_rank(["go"] * 5, "ranks {ranks} {value}") == "ranks [0-4] go"


ENGINE = "its process is stopped, or some code in it holds Python's global interpreter lock"
HOSTS = ("a", "a", "b", "b", "c")


def test_on_one_host_there_is_no_network_to_blame() -> None:
    assert describe_wait(Topology(1, ("a",) * 4), [0, 3], 61.4) == (
        f"rank 1 has waited 61 s for ranks [0, 3]. The engine of at least one of these ranks does not run: {ENGINE}.")


def test_a_wait_for_other_hosts_may_be_for_the_network() -> None:
    assert describe_wait(Topology(1, HOSTS), [2, 3, 4], 15.0) == (
        "rank 1 on a has waited 15 s for ranks [2, 3] on b, [4] on c. Either the network between the hosts a, b and c "
        f"is down or loses what is sent; or the engine of one of these ranks does not run: {ENGINE}.")
    assert "between the hosts c and b is down" in describe_wait(Topology(4, HOSTS), [3], 15.0)


def test_a_rank_of_the_same_host_may_itself_wait_for_another_host() -> None:
    text = describe_wait(Topology(0, HOSTS), [1], 15.0)
    assert text.startswith("rank 0 on a has waited 15 s for ranks [1] on a. The engine of at least one of these ranks")
    assert text.endswith("Or one of the ranks waits for another host: the network between the hosts a, b and c "
                         "is down or loses what is sent.")


def test_of_many_hosts_some_are_named() -> None:
    topology = Topology(0, tuple(f"h{rank}" for rank in range(9)))
    assert describe_ranks(topology, range(1, 9)) == (
        "ranks [1] on h1, [2] on h2, [3] on h3, [4] on h4, [5] on h5, [6] on h6, and 2 more hosts")


@pytest.mark.parametrize("present, expected", [([0, 2], ["c"]), ([1], ["b", "c"]), ([0, 3, 4], [])])
def test_a_host_is_silent_when_all_its_ranks_are(present: list[int], expected: list[str]) -> None:
    assert Topology(0, HOSTS).hosts_without(present) == expected
