"""tf.data service on ranks, with the names of horovod.tensorflow.data: compute_service, and the command compute_worker.
"""
