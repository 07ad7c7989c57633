"""TfDataServiceConfig: what the training job must know of a data service, and its file.

For users, and the command compute_worker.
"""

import contextlib
import dataclasses
import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.errors import DataServiceError, InvalidRequestError
from ...core.tuning import DATA_SERVICE_FILE_POLL_S
from .client import ComputeClient

SIDES = ("compute", "training")


@dataclass(frozen=True)
class TfDataServiceConfig:
    """The configuration of a data service. The job of the workers writes it, the training job reads it.

    Attributes:
        dispatchers: The number of dispatchers. Training rank r uses dispatcher r modulo this number.
        workers_per_dispatcher: The number of workers of each dispatcher.
        dispatcher_side: The job whose first ranks run the dispatchers: "compute" or "training".
        addresses: The addresses of the registry, as pairs of IP address and port by the name of its host.
        key: The secret that both jobs share.
        timeout: Seconds after which a rank no longer waits for a dispatcher, or for the workers of one.

    Raises:
        InvalidRequestError: A value is out of range.
    """

    dispatchers: int
    workers_per_dispatcher: int
    dispatcher_side: str
    addresses: dict[str, list[tuple[str, int]]]
    key: bytes
    timeout: float = 60

    def __post_init__(self) -> None:
        for name in ("dispatchers", "workers_per_dispatcher"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise InvalidRequestError(f"{name} is a whole number from 1. Received: {value!r}")
        if self.dispatcher_side not in SIDES:
            raise InvalidRequestError(f"dispatcher_side is one of {', '.join(SIDES)}. "
                                      f"Received: {self.dispatcher_side!r}")
        if not self.addresses or not all(self.addresses.values()):
            raise InvalidRequestError("addresses has at least one pair of IP address and port for each host. "
                                      f"Received: {self.addresses!r}")
        if not isinstance(self.key, bytes) or not self.key:
            raise InvalidRequestError("key is a secret of at least one byte, as bytes.")
        if not isinstance(self.timeout, int | float) or not self.timeout > 0:
            raise InvalidRequestError(f"timeout is a number of seconds above 0. Received: {self.timeout!r}")

    def compute_client(self, verbose: int = 1) -> ComputeClient:
        """Return a client of the registry. `compute_client().shutdown()` ends the workers. Local.

        Args:
            verbose: 2: log what is registered and waited for, at level INFO.
        """
        return ComputeClient(self.addresses, self.key, verbose)

    def write(self, filename: str | os.PathLike[str]) -> None:
        """Write the configuration as JSON. The file appears as a whole, and only this user can read it. Local.

        Raises:
            OSError: The file cannot be written.
        """
        path = Path(filename)
        # mkstemp makes a file for this user only, since it contains the key; replace() is atomic within a directory.
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with open(handle, "w", encoding="utf-8") as file:
                json.dump({**dataclasses.asdict(self), "key": self.key.hex()}, file)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):  # The error above says what is wrong.
                os.unlink(temporary)
            raise

    @staticmethod
    def read(filename: str | os.PathLike[str], wait_for_file_creation: bool = False,
             timeout: float = 60) -> "TfDataServiceConfig":
        """Read the configuration from a file. Local.

        Args:
            filename: What the job of the workers has written, in a directory that both jobs see.
            wait_for_file_creation: Wait for the file, if it is not there yet.
            timeout: Seconds after which it no longer waits.

        Raises:
            FileNotFoundError: The file is not there, and this rank does not wait.
            DataServiceError: The file is not there after `timeout` seconds.
            InvalidRequestError: The file is no configuration.
        """
        path, until = Path(filename), time.monotonic() + timeout
        while True:
            try:
                text = path.read_text(encoding="utf-8")
                break
            except FileNotFoundError:
                if not wait_for_file_creation:
                    raise
            if time.monotonic() > until:
                raise DataServiceError(f"{path} is not there after {timeout:g} s. Has the job of the workers started? "
                                       f"python -m mpistrat.tensorflow.data.compute_worker {path}")
            time.sleep(DATA_SERVICE_FILE_POLL_S)
        try:
            content: dict[str, Any] = json.loads(text)
            content["key"] = bytes.fromhex(content["key"])
            content["addresses"] = {host: [(str(address), int(port)) for address, port in pairs]
                                    for host, pairs in content["addresses"].items()}
            return TfDataServiceConfig(**content)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidRequestError(f"{path} is not the configuration of a data service of this version of "
                                      f"mpistrat: {error}") from error
