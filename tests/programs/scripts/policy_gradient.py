"""Reinforcement learning without tf.function: each rank plays episodes of its own, of different lengths."""

import keras
import numpy as np
import tensorflow as tf

import mpistrat.tensorflow as hvd

hvd.init()
random = np.random.default_rng(10 + hvd.rank())
policy = keras.Sequential([keras.Input((2,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(3)])
optimizer = keras.optimizers.Adam(0.02)
optimizer.build(policy.trainable_variables)
hvd.broadcast_variables(policy.variables + optimizer.variables, root_rank=0)


def play():
    """States, actions and returns of an episode: push a cart to the origin, at most 30 times."""
    states, actions, rewards = [], [], []
    place, speed = random.uniform(-1, 1), 0.0
    while len(states) < 30 and (abs(place) > 0.1 or not states):
        states.append((place, speed))
        actions.append(int(random.choice(3, p=tf.nn.softmax(policy(np.array([states[-1]])))[0].numpy())))
        speed = 0.9 * speed + 0.05 * (actions[-1] - 1)
        place += speed
        rewards.append(-abs(place))
    return np.array(states, "float32"), np.array(actions), np.cumsum(rewards[::-1])[::-1].astype("float32")


for update in range(6):
    states, actions, returns = (np.concatenate(parts) for parts in zip(*(play() for _ in range(2))))
    # All ranks take the same baseline, weighted with the numbers of moves.
    total, moves = hvd.allreduce(tf.constant([returns.sum(), float(len(returns))]), op=hvd.Sum).numpy()
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        chosen = keras.losses.sparse_categorical_crossentropy(actions, policy(states), from_logits=True)
        loss = tf.reduce_sum(chosen * (returns - total / moves)) / (moves / hvd.size())
    optimizer.apply(tape.gradient(loss, policy.trainable_variables), policy.trainable_variables)
    if hvd.rank() == 0:
        print(f"update {update}: mean return {total / moves:.3f} of {int(moves)} moves")
