"""Read from a data service as a Horovod script does: python data_service.py CONFIG ELEMENTS [independent|turns].

Every rank says which elements it got. With "independent" each rank gets all elements; with "turns" the ranks take
elements of an infinite dataset in turn.
"""

import sys

import tensorflow as tf
from reporting import say

import mpistrat.tensorflow as hvd
from mpistrat.tensorflow.data.compute_service import TfDataServiceConfig, tf_data_service

path, elements, *how = sys.argv[1:]
hvd.init()
config = TfDataServiceConfig.read(path, wait_for_file_creation=True)
data = tf.data.Dataset.range(int(elements)).map(lambda value: value * value)
if config.dispatcher_side == "training":
    with tf_data_service(config, hvd.rank()) as address:
        data = data.apply(tf.data.experimental.service.distribute("distributed_epoch", address, job_name="job"))
        say(str(sorted(int(value) for value in data)))
elif how == ["turns"]:
    data = data.repeat().send_to_data_service(config, hvd.rank(), size=hvd.size(), processing_mode="parallel_epochs",
                                              reuse_dataset=True, round_robin=True)
    say(str([int(value) for value in data.take(3)]))
else:
    for _ in range(2):  # A second dataset gets all elements again.
        epoch = data.send_to_data_service(config, hvd.rank(), size=hvd.size(), reuse_dataset=not how)
        say(str(sorted(int(value) for value in epoch)))
if config.dispatcher_side == "compute":
    hvd.barrier()
    if hvd.rank() == 0:
        config.compute_client().shutdown()
