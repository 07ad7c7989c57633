"""What is said of waits for other ranks."""

import pytest

from mpistrat.core.topology import Topology, describe_ranks, describe_wait

ENGINE = "its process is stopped, or something in it keeps Python's global interpreter lock"
HOSTS = ("a", "a", "b", "b", "c")


def test_on_one_host_there_is_no_network_to_blame() -> None:
    assert describe_wait(Topology(1, ("a",) * 4), [0, 3], 61.4) == (
        f"rank 1 has waited 61 s for ranks [0, 3]. The engine of one of them, at least, does not run: {ENGINE}.")


def test_a_wait_for_other_hosts_may_be_for_the_network() -> None:
    assert describe_wait(Topology(1, HOSTS), [2, 3, 4], 15.0) == (
        "rank 1 on a has waited 15 s for ranks [2, 3] on b, [4] on c. Either the network between the hosts a and b, c "
        f"is down or loses what is sent; or the engine of one of these ranks does not run: {ENGINE}.")
    assert "between the hosts c and b is down" in describe_wait(Topology(4, HOSTS), [3], 15.0)


def test_a_rank_of_the_same_host_may_itself_wait_for_another_host() -> None:
    text = describe_wait(Topology(0, HOSTS), [1], 15.0)
    assert text.startswith("rank 0 on a has waited 15 s for ranks [1] on a. The engine of one of them, at least")
    assert text.endswith("Or it waits in turn for another host: the network between the hosts a and b, c is down or "
                         "loses what is sent.")


def test_of_many_hosts_some_are_named() -> None:
    topology = Topology(0, tuple(f"h{rank}" for rank in range(9)))
    assert describe_ranks(topology, range(1, 9)) == (
        "ranks [1] on h1, [2] on h2, [3] on h3, [4] on h4, [5] on h5, [6] on h6, and 2 more hosts")


@pytest.mark.parametrize("present, expected", [([0, 2], ["c"]), ([1], ["b", "c"]), ([0, 3, 4], [])])
def test_a_host_is_silent_when_all_its_ranks_are(present: list[int], expected: list[str]) -> None:
    assert Topology(0, HOSTS).hosts_without(present) == expected
