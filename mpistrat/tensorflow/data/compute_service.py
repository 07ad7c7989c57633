"""The tf.data service on MPI ranks, with the names of horovod.tensorflow.data.compute_service.

One job has the workers, `mpirun -np 4 python -m mpistrat.tensorflow.data.compute_worker service.json`; another job
trains, and reads the file. Importing this module gives tf.data.Dataset the method `send_to_data_service`, as in
Horovod. For users.
"""

import contextlib
import secrets
from collections.abc import Iterator

import tensorflow as tf

from ...api import missing_names, runtime
from ...api.ops import allgather_object, barrier, broadcast_object
from ...cluster.rendezvous import Link, addresses_of
from ...core.errors import InvalidRequestError
from .client import ComputeClient, address_of_host
from .config import TfDataServiceConfig
from .registry import ComputeService

__all__ = ["ComputeClient", "ComputeService", "TfDataServiceConfig", "compute_worker_fn", "send_to_data_service",
           "tf_data_service"]

__getattr__ = missing_names.explain(__name__)

_NAME = "mpistrat.tensorflow.data"


@contextlib.contextmanager
def tf_data_service(compute_config: TfDataServiceConfig, rank: int) -> Iterator[str]:
    """A context in which a rank of the training job uses its dispatcher; gives the address, "grpc://host:port".

        with tf_data_service(compute_config, hvd.rank()) as address:
            data = data.apply(tf.data.experimental.service.distribute("distributed_epoch", address, job_name="job"))
            model.fit(data, ...)

    With dispatchers on the training side, the first ranks run them within the context, and the workers end with them.
    So every rank must be in the context, and after init() its normal end is collective: no rank leaves while others
    may still read. With dispatchers on the compute side it is local.

    Args:
        compute_config: That of the job of the workers.
        rank: The training rank, which uses dispatcher `rank % compute_config.dispatchers`.

    Raises:
        DataServiceError: The job of the workers does not answer or has ended, or the dispatcher or its workers have not
            started after `compute_config.timeout` seconds.
        InvalidRequestError: The rank is negative.
    """
    if rank < 0:
        raise InvalidRequestError(f"rank is a number from 0. Received: {rank}")
    client = compute_config.compute_client()
    dispatcher = rank % compute_config.dispatchers
    is_here = compute_config.dispatcher_side == "training"
    with contextlib.ExitStack() as at_end:
        if is_here and rank < compute_config.dispatchers:
            at_end.enter_context(_dispatcher(client, dispatcher, client.own_address()))
        address = client.wait_for_dispatcher_registration(dispatcher, compute_config.timeout)
        client.wait_for_dispatcher_worker_registration(dispatcher, compute_config.timeout)
        yield address
        if is_here and runtime.is_initialized():
            barrier(f"{_NAME}/end")


def send_to_data_service(dataset: tf.data.Dataset, compute_config: TfDataServiceConfig, rank: int,
                         size: int | None = None,
                         processing_mode: str | tf.data.experimental.service.ShardingPolicy = "distributed_epoch",
                         reuse_dataset: bool = False, round_robin: bool = False) -> tf.data.Dataset:
    """Return a dataset whose elements the workers prepare. Also a method of tf.data.Dataset.

        data = data.send_to_data_service(compute_config, hvd.rank(), hvd.size(), reuse_dataset=True)

    For dispatchers on the compute side; tf_data_service is for those on the training side.

    By default each rank gets all elements of the dataset, prepared by all workers of its dispatcher. With
    `reuse_dataset=True` the workers prepare the dataset once, and each element goes to one of the ranks that have the
    same dispatcher. Then the call is collective, after init() with several ranks, and the dataset must be the same on
    all of them.

    Args:
        dataset: What the workers shall do.
        compute_config: That of the job of the workers.
        rank: The training rank.
        size: The number of training ranks. Only needed for `round_robin`.
        processing_mode: "distributed_epoch": the workers of a dispatcher share the elements; "parallel_epochs": each
            worker goes through all elements; or a tf.data.experimental.service.ShardingPolicy.
        reuse_dataset: The ranks share the elements.
        round_robin: The ranks take batches in turn, as tf.data's `consumer_index` has it. The dataset must be infinite.

    Raises:
        InvalidRequestError: The dispatchers are on the training side, where tf_data_service is to be used; or
            `round_robin` without `reuse_dataset` or `size`.
        DataServiceError: As for tf_data_service.
    """
    if compute_config.dispatcher_side == "training":
        raise InvalidRequestError("the dispatchers of this data service are on the training side, and end with the "
                                  "context of tf_data_service: write `with tf_data_service(compute_config, rank) as "
                                  "address:` and tf.data.experimental.service.distribute in it.")
    if round_robin and (not reuse_dataset or size is None):
        raise InvalidRequestError("round_robin=True needs reuse_dataset=True and size=, the number of training ranks.")
    consumers: dict[str, int] = {}
    if round_robin and size is not None:
        dispatcher = rank % compute_config.dispatchers
        consumers = {"consumer_index": rank // compute_config.dispatchers,
                     "num_consumers": len(range(dispatcher, size, compute_config.dispatchers))}
    with tf_data_service(compute_config, rank) as address:
        job_name = None
        if reuse_dataset:
            # A new name for each dataset, since the service keeps the state of an old one.
            job_name = f"job-{secrets.token_hex(8)}"
            if runtime.is_initialized():
                job_name = broadcast_object(job_name, name=f"{_NAME}/job")
        return dataset.apply(tf.data.experimental.service.distribute(processing_mode, address, job_name=job_name,
                                                                     **consumers))


def compute_worker_fn(compute_config: TfDataServiceConfig) -> None:
    """Run one worker on this rank until the service is shut down; on the first rank of each group its dispatcher too.

    Collective in the job of the workers, of `dispatchers * workers_per_dispatcher` ranks; calls init(). Rank r is a
    worker of dispatcher `r // workers_per_dispatcher`. With dispatchers on the training side the workers also end when
    all dispatchers have ended. The registry at `compute_config.addresses` is a ComputeService that the caller runs.

    Args:
        compute_config: The configuration, the same on all ranks.

    Raises:
        InvalidRequestError: On every rank, if the number of ranks is another.
        DataServiceError: The registry does not answer, or the dispatcher has not started after
            `compute_config.timeout` seconds.
    """
    runtime.init()
    topology = runtime.current().topology
    workers = compute_config.workers_per_dispatcher
    if topology.size != compute_config.dispatchers * workers:
        raise InvalidRequestError(f"{compute_config.dispatchers} dispatchers with {workers} workers each need "
                                  f"{compute_config.dispatchers * workers} ranks, and there are {topology.size}.")
    client = compute_config.compute_client()
    dispatcher, position = divmod(topology.rank, workers)
    links = allgather_object(Link(*client.link()), name=f"{_NAME}/link")
    # With one host alone nothing is known of the way to it; the training job may be elsewhere.
    host = address_of_host() if len(topology.hosts) == 1 else addresses_of(topology, links)[topology.rank]
    with contextlib.ExitStack() as at_end:
        if compute_config.dispatcher_side == "compute" and position == 0:
            at_end.enter_context(_dispatcher(client, dispatcher, host))
        address = client.wait_for_dispatcher_registration(dispatcher, compute_config.timeout)
        protocol, _, target = address.partition("://")
        worker = tf.data.experimental.service.WorkerServer(tf.data.experimental.service.WorkerConfig(
            dispatcher_address=target, worker_address=f"{host}:%port%", protocol=protocol))
        try:
            client.register_worker_for_dispatcher(dispatcher, topology.rank)
            client.wait_for_shutdown()
        finally:
            worker.stop()
        barrier(f"{_NAME}/end of the workers")  # The dispatchers end after all workers.


@contextlib.contextmanager
def _dispatcher(client: ComputeClient, dispatcher: int, host: str) -> Iterator[None]:
    """A context in which a dispatcher runs in this process."""
    server = tf.data.experimental.service.DispatchServer()
    protocol, _, target = server.target.partition("://")
    client.register_dispatcher(dispatcher, f"{protocol}://{host}:{target.rpartition(':')[2]}")
    try:
        yield
    finally:
        client.end_dispatcher(dispatcher)
        server.stop()


tf.data.Dataset.send_to_data_service = send_to_data_service
