"""The data service without ranks: its configuration, its registry, and what is refused."""

import os
import socket
import stat
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

tf = pytest.importorskip("tensorflow")

import mpistrat  # noqa: E402
from mpistrat.core.errors import DataServiceError, InvalidRequestError  # noqa: E402
from mpistrat.tensorflow.data import compute_worker  # noqa: E402
from mpistrat.tensorflow.data.client import ComputeClient, address_of_host  # noqa: E402
from mpistrat.tensorflow.data.compute_service import (  # noqa: E402
    ComputeService,
    TfDataServiceConfig,
    compute_worker_fn,
    send_to_data_service,
    tf_data_service,
)

CONFIG = TfDataServiceConfig(1, 2, "compute", {"here": [("127.0.0.1", 5)]}, b"secret", 30)
ADDRESS = "grpc://10.0.0.1:5050"
LONG_S = 60.0


@pytest.fixture
def service() -> Iterator[ComputeService]:
    """The registry of two dispatchers with two workers each."""
    with ComputeService(2, 2) as running:
        yield running


@pytest.fixture
def client(service: ComputeService) -> ComputeClient:
    return ComputeClient(service.addresses(), service.key)


def in_thread(function: Any, *args: Any) -> tuple[threading.Thread, list[Any]]:
    """A thread that runs the function, and the list that gets its result or its error."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(function(*args))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


# -- the configuration ------------------------------------------------------------------------------------------------


def test_the_file_gives_the_same_configuration(tmp_path: Path) -> None:
    CONFIG.write(tmp_path / "service.json")
    assert TfDataServiceConfig.read(tmp_path / "service.json") == CONFIG
    replace(CONFIG, timeout=5).write(str(tmp_path / "service.json"))
    assert TfDataServiceConfig.read(str(tmp_path / "service.json"), True).timeout == 5


def test_only_the_user_can_read_the_key_and_nothing_else_is_left(tmp_path: Path) -> None:
    CONFIG.write(tmp_path / "service.json")
    assert stat.S_IMODE((tmp_path / "service.json").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["service.json"]


def test_an_error_of_the_cleaning_up_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(number: int, text: str) -> None:
        raise OSError(number, text)
    monkeypatch.setattr(os, "replace", lambda *_: fails(28, "No space left on device"))
    monkeypatch.setattr(os, "unlink", lambda *_: fails(30, "Read-only file system"))
    with pytest.raises(OSError, match="No space left"):
        CONFIG.write(tmp_path / "service.json")


def test_a_file_that_comes_later_is_waited_for(tmp_path: Path) -> None:
    thread, outcome = in_thread(TfDataServiceConfig.read, tmp_path / "service.json", True)
    CONFIG.write(tmp_path / "service.json")
    thread.join(LONG_S)
    assert outcome == [CONFIG]


def test_a_file_that_never_comes_is_named_with_what_writes_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        TfDataServiceConfig.read(tmp_path / "no.json")
    with pytest.raises(DataServiceError, match=r"no\.json is not there after 0\.2 s\. .*compute_worker .*no\.json$"):
        TfDataServiceConfig.read(tmp_path / "no.json", wait_for_file_creation=True, timeout=0.2)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"key": "zz", "addresses": {}}', '{"key": 3, "addresses": {}}'])
def test_another_file_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(InvalidRequestError, match=r"other\.json is not the configuration of a data service"):
        TfDataServiceConfig.read(tmp_path / "other.json")


@pytest.mark.parametrize(("name", "value"), [
    ("dispatchers", 0), ("dispatchers", "1"), ("workers_per_dispatcher", -1), ("dispatcher_side", "both"),
    ("addresses", {}), ("addresses", {"here": []}), ("key", ""), ("key", b""), ("timeout", 0), ("timeout", None)])
def test_a_wrong_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^{name} (is|has) "):
        replace(CONFIG, **{name: value})


# -- the registry -----------------------------------------------------------------------------------------------------


def test_a_dispatcher_is_waited_for(client: ComputeClient) -> None:
    thread, outcome = in_thread(client.wait_for_dispatcher_registration, 1, LONG_S)
    client.register_dispatcher(1, ADDRESS)
    thread.join(LONG_S)
    assert outcome == [ADDRESS]
    with pytest.raises(DataServiceError, match=rf"^dispatcher 1 is already there, at {ADDRESS} \(this rank asked"):
        client.register_dispatcher(1, ADDRESS)


def test_all_workers_of_a_dispatcher_are_waited_for(client: ComputeClient) -> None:
    thread, outcome = in_thread(client.wait_for_dispatcher_worker_registration, 0, LONG_S)
    for worker in (0, 1):
        client.register_worker_for_dispatcher(0, worker)
    thread.join(LONG_S)
    assert outcome == [None]


def test_every_wait_ends_and_says_for_what(client: ComputeClient) -> None:
    with pytest.raises(DataServiceError, match=r"waited 0\.1 s for dispatcher 1 of 2\. Has the other job started"):
        client.wait_for_dispatcher_registration(1, 0.1)
    client.register_worker_for_dispatcher(1, 3)
    client.register_worker_for_dispatcher(1, 3)
    with pytest.raises(DataServiceError, match=r"for the workers of dispatcher 1, of which 1 of 2 are there\."):
        client.wait_for_dispatcher_worker_registration(1, 0.1)


def test_a_dispatcher_that_cannot_be_is_an_error_at_once(client: ComputeClient) -> None:
    with pytest.raises(DataServiceError, match=r"^there is no dispatcher 2; there are 2, from 0"):
        client.wait_for_dispatcher_registration(2, LONG_S)


def test_shutdown_ends_the_workers_and_what_others_wait_for(client: ComputeClient) -> None:
    worker, ended = in_thread(client.wait_for_shutdown)
    rank, outcome = in_thread(client.wait_for_dispatcher_registration, 0, LONG_S)
    client.shutdown()
    worker.join(LONG_S)
    rank.join(LONG_S)
    assert ended == [None]
    assert str(outcome[0]).startswith("the data service has been shut down (this rank asked for dispatcher 0)")


def test_the_workers_end_when_all_dispatchers_have(client: ComputeClient) -> None:
    worker, ended = in_thread(client.wait_for_shutdown)
    client.end_dispatcher(0)
    with pytest.raises(DataServiceError, match=r"^dispatcher 0 has ended"):
        client.wait_for_dispatcher_registration(0, LONG_S)
    assert ended == []
    client.end_dispatcher(1)
    worker.join(LONG_S)
    assert ended == [None]


def test_a_service_that_has_ended_is_named_but_may_be_shut_down_again(service: ComputeService,
                                                                      client: ComputeClient) -> None:
    service.close()
    service.close()
    with pytest.raises(DataServiceError, match=r"does not answer this rank, which asks for dispatcher 0 \(.*refused\)"):
        client.wait_for_dispatcher_registration(0, LONG_S)
    client.shutdown()
    client.end_dispatcher(0)


def test_who_has_another_key_gets_nothing(service: ComputeService, client: ComputeClient) -> None:
    client.register_dispatcher(0, ADDRESS)
    stranger = ComputeClient(service.addresses(), b"another")
    stranger.shutdown()
    with pytest.raises(DataServiceError, match=r"asks for dispatcher 0 \(.*another secret"):
        stranger.wait_for_dispatcher_registration(0, LONG_S)
    assert client.wait_for_dispatcher_registration(0, LONG_S) == ADDRESS


def test_a_connection_that_sends_nothing_delays_nobody(service: ComputeService, client: ComputeClient) -> None:
    [[(host, port), *_]] = service.addresses().values()
    with socket.create_connection((host, port)):
        client.register_dispatcher(0, ADDRESS)
        assert client.wait_for_dispatcher_registration(0, LONG_S) == ADDRESS


def test_the_address_of_this_host_can_be_connected_to() -> None:
    with socket.create_server(("", 0)) as server, \
            socket.create_connection((address_of_host(), server.getsockname()[1]), 10) as connection:
        assert connection.getpeername()[0] == address_of_host()


# -- arguments --------------------------------------------------------------------------------------------------------


def test_a_dataset_has_the_method_of_horovod() -> None:
    assert tf.data.Dataset.send_to_data_service is send_to_data_service


def test_dispatchers_on_the_training_side_need_the_context() -> None:
    with pytest.raises(InvalidRequestError, match=r"with tf_data_service\(compute_config, rank\) as address"):
        tf.data.Dataset.range(3).send_to_data_service(replace(CONFIG, dispatcher_side="training"), 0)


@pytest.mark.parametrize("arguments", [{"size": 2}, {"reuse_dataset": True}])
def test_taking_turns_needs_a_shared_dataset_and_the_number_of_ranks(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=r"round_robin=True needs reuse_dataset=True and size="):
        tf.data.Dataset.range(3).send_to_data_service(CONFIG, 0, round_robin=True, **arguments)


def test_a_negative_rank_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="rank is a number from 0"), tf_data_service(CONFIG, -1):
        pass


def test_another_number_of_ranks_is_refused() -> None:
    try:
        with pytest.raises(InvalidRequestError, match=r"1 dispatchers with 2 workers each need 2 ranks, and there are"):
            compute_worker_fn(CONFIG)
    finally:
        mpistrat.shutdown()


@pytest.mark.parametrize("arguments", [
    [], ["service.json", "--dispatchers", "2"], ["service.json", "--dispatchers", "0"],
    ["service.json", "--timeout", "0"], ["service.json", "--dispatcher-side", "both"]], ids=str)
def test_the_command_refuses_wrong_arguments(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        compute_worker.main(arguments)
    assert caught.value.code == 2
    assert "error: " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
