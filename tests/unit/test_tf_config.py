"""TF_CONFIG: what is read, and what does not fit the ranks."""

import json
from collections.abc import Mapping

import pytest

from mpistrat.core.roles import Role
from mpistrat.tensorflow.cluster.tf_config import TfConfig, check, read

CLUSTER = {"chief": ["a:1"], "worker": ["a:2", "b:3"], "ps": ["b:4"]}
TASKS = [("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0)]


def config(role: str, index: int, cluster: Mapping[str, list[str]] = CLUSTER) -> TfConfig | None:
    return read(json.dumps({"cluster": cluster, "task": {"type": role, "index": index}}))


def configs(tasks: list[tuple[str, int]], cluster: Mapping[str, list[str]] = CLUSTER) -> list[TfConfig | None]:
    return [config(role, index, cluster) for role, index in tasks]


# -- read -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "{}", '{"environment": "cloud"}', '{"cluster": {}}'])
def test_without_a_cluster_it_says_nothing(text: str) -> None:
    assert read(text) is None


def test_the_cluster_and_the_task_are_read() -> None:
    found = config("worker", 1)
    assert found == TfConfig({"chief": ("a:1",), "worker": ("a:2", "b:3"), "ps": ("b:4",)}, Role.WORKER, 1)
    assert found is not None and found.port == 3


def test_an_index_may_be_a_text() -> None:
    text = json.dumps({"cluster": CLUSTER, "task": {"type": "worker", "index": "1"}})
    assert read(text) == config("worker", 1)


def test_an_evaluator_is_not_in_the_cluster_and_has_no_port() -> None:
    found = config("evaluator", 0)
    assert found is not None and (found.role, found.port) == (Role.EVALUATOR, 0)


def test_what_is_not_json_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"^TF_CONFIG is not JSON: .* Received: \{chief"):
        read("{chief")


@pytest.mark.parametrize("content", [
    {"cluster": CLUSTER}, {"cluster": CLUSTER, "task": {"type": "ps"}}, {"cluster": ["a:1"], "task": {}},
    {"cluster": CLUSTER, "task": {"type": "ps", "index": "first"}}, {"cluster": {"chief": 1}, "task": {}}])
def test_a_missing_or_malformed_part_is_an_error_that_shows_the_form(content: dict) -> None:
    with pytest.raises(ValueError, match=r'^TF_CONFIG is not \{"cluster": \{role: .* Received: '):
        read(json.dumps(content))


@pytest.mark.parametrize(("role", "cluster"), [("master", CLUSTER), ("chief", {**CLUSTER, "master": ["a:9"]})])
def test_an_unknown_role_is_an_error_that_lists_the_roles(role: str, cluster: dict) -> None:
    with pytest.raises(ValueError, match="unknown role 'master'; the roles are chief, worker, ps, evaluator"):
        config(role, 0, cluster)


@pytest.mark.parametrize("address", ["a", "a:", ":5", "a:port", "a:0", "a:65536"])
def test_an_address_has_a_host_and_a_port(address: str) -> None:
    with pytest.raises(ValueError, match=rf"^TF_CONFIG: an address is host:port\. Received: '{address}'$"):
        config("chief", 0, {"chief": [address]})


@pytest.mark.parametrize(("role", "index"), [("worker", 2), ("ps", -1), ("evaluator", -1)])
def test_a_task_outside_of_the_cluster_is_an_error(role: str, index: int) -> None:
    with pytest.raises(ValueError, match=rf"^TF_CONFIG: task {role} {index} is not in the cluster\."):
        config(role, index)


# -- check ------------------------------------------------------------------------------------------------------------


def test_ranks_without_it_have_no_roles_from_it() -> None:
    assert check([None, None], {"chief": 1, "worker": 1}) is None


@pytest.mark.parametrize("jobs", [None, {"chief": 1, "worker": 2, "ps": 1}, {"ps": 1, "chief": 1, "worker": 2}])
def test_it_says_the_role_of_each_rank(jobs: dict[str, int] | None) -> None:
    tasks = [("chief", 0), ("ps", 0), ("worker", 1), ("worker", 0)]
    assert check(configs(tasks), jobs) == tuple((Role(role), index) for role, index in tasks)


def test_worker_0_is_the_chief_of_a_cluster_that_has_none() -> None:
    cluster = {"worker": ["a:1", "b:2"]}
    assert check(configs([("worker", 0), ("worker", 1)], cluster), None) == ((Role.WORKER, 0), (Role.WORKER, 1))


def test_an_evaluator_has_a_rank_too() -> None:
    roles = check(configs([*TASKS, ("evaluator", 0)]), {"chief": 1, "worker": 2, "ps": 1, "evaluator": 1})
    assert roles is not None and roles[4] == (Role.EVALUATOR, 0)


def test_it_is_set_on_all_ranks_or_on_none() -> None:
    given = configs(TASKS)
    given[1] = given[3] = None
    with pytest.raises(ValueError, match=r"is set on ranks \[0, 2\], but not on ranks \[1, 3\]\. Set it on every rank"):
        check(given, None)


def test_clusters_that_differ_are_named_with_their_ranks() -> None:
    given = configs(TASKS)
    given[2] = config("worker", 1, {**CLUSTER, "ps": ["c:4"]})
    with pytest.raises(ValueError, match=r"disagree on the cluster of TF_CONFIG: .*\"b:4\".* on ranks \[0, 1, 3\]; "
                                         r".*\"c:4\".* on ranks \[2\]\.$"):
        check(given, None)


def test_the_order_of_the_roles_in_the_text_does_not_matter() -> None:
    given = configs(TASKS)
    given[3] = config("ps", 0, dict(reversed(CLUSTER.items())))
    assert check(given, None) is not None


def test_a_task_of_two_ranks_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"gives task worker 0 to ranks \[1, 2\]"):
        check(configs([("chief", 0), ("worker", 0), ("worker", 0), ("ps", 0)]), None)


def test_a_task_without_a_rank_is_an_error_that_says_how_many_ranks_there_should_be() -> None:
    with pytest.raises(ValueError, match=r"tasks that no rank has: worker 1, ps 0; there are 2 ranks \(mpirun -np 4\)"):
        check(configs(TASKS[:2]), None)


def test_the_chief_is_rank_0() -> None:
    with pytest.raises(ValueError, match=r"makes rank 0 worker 0, but rank 0 is the chief\. .* on ranks \[1\]"):
        check(configs([TASKS[1], TASKS[0], *TASKS[2:]]), None)


def test_numbers_other_than_those_of_jobs_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"jobs are \{'chief': 1, 'worker': 3\}, but TF_CONFIG has \{'chief': 1, "
                                         r"'worker': 2, 'ps': 1\}\."):
        check(configs(TASKS), {"chief": 1, "worker": 3})
