"""DeePMD-kit's command `dp`, which says in the end whether the ranks have variables of the same bits. For its arguments
see test_deepmd.py.
"""

import hashlib
import sys

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from deepmd.main import main
from deepmd.tf.train.trainer import DPTrainer

train = DPTrainer.train


def train_and_compare(self: DPTrainer, *args: object, **kwargs: object) -> None:
    train(self, *args, **kwargs)
    with self.sess.graph.as_default():
        variables = tf.compat.v1.global_variables()
    values = self.sess.run(variables)
    digest = hashlib.sha256(b"".join(np.asarray(value).tobytes() for value in values)).hexdigest()
    print(f"rank {hvd.rank()}: {len(values)} variables, {len(set(hvd.allgather_object(digest)))} kinds of bits",
          flush=True)


DPTrainer.train = train_and_compare
main(sys.argv[1:])
