"""Sessions after tf.compat.v1.disable_v2_behavior(), as scripts of TensorFlow 1 have them. Each rank prints "ends"."""

import numpy as np
import tensorflow as tf

import mpistrat.tensorflow as hvd  # before init(), and before TensorFlow 2 is switched off

v1 = tf.compat.v1
v1.disable_v2_behavior()
hvd.init()
rank, size = hvd.rank(), hvd.size()

x = v1.placeholder(tf.float32, [None, 3])
y = v1.placeholder(tf.float32, [None, 1])
w = v1.get_variable("w", [3, 1], initializer=v1.random_normal_initializer(seed=rank))  # a reference variable
loss = tf.reduce_mean((tf.matmul(x, w) - y) ** 2)
mean = hvd.allreduce(loss)
gathered = hvd.allgather(tf.fill([rank + 1], rank))
many = [hvd.allreduce(tf.constant(float(i + rank)), op=hvd.Sum) for i in range(60)]
loop = tf.while_loop(lambda i, _: i < 20.0, lambda i, t: (i + 1.0, t + i * hvd.allreduce(i + rank, op=hvd.Sum)),
                     [0.0, 0.0])[1]
step = v1.train.get_or_create_global_step()
train = hvd.DistributedOptimizer(v1.train.AdamOptimizer(0.1)).minimize(loss, global_step=step)

rng, order = np.random.default_rng(rank), np.random.default_rng(rank).permutation(60)
hooks = [hvd.BroadcastGlobalVariablesHook(0), v1.train.StopAtStepHook(last_step=200)]
with v1.train.MonitoredTrainingSession(hooks=hooks) as session:
    start, rows, sums, total = session.run([w, gathered, [many[i] for i in order], loop],
                                           {x: np.zeros([1, 3]), y: np.zeros([1, 1])})
    while not session.should_stop():
        batch = rng.normal(size=(16, 3))
        last, _, end = session.run([mean, train, w], {x: batch, y: batch @ [[1.0], [2.0], [3.0]]})

more = size * (size - 1) / 2
assert rows.tolist() == [other for other in range(size) for _ in range(other + 1)]
assert sums == [i * size + more for i in order]
assert total == sum(i * (i * size + more) for i in range(20))
everybody = hvd.allgather_object((start.tobytes(), end.tobytes(), float(last)))
assert all(other == everybody[0] for other in everybody), everybody
assert last < 0.2, last
hvd.shutdown()
print("ends", flush=True)
