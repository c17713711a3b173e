"""REINFORCE: episodes of different length on every rank, one update after each, with a tape.

expect: differ-ok
"""

import os

import keras
import numpy as np
import tensorflow as tf

import hvd_keras as hvd

EPISODES, LONGEST, DISCOUNT = 20, 30, 0.95


class Walk:
    """Go right to the end of a corridor, before the time is over."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)

    def reset(self):
        self.place, self.time = int(self.random.integers(0, 3)), 0
        return self.state()

    def state(self):
        return np.array([self.place / 5, self.time / LONGEST], "float32")

    def step(self, action):
        self.place, self.time = max(0, self.place + (1 if action else -1)), self.time + 1
        done = self.place == 5
        return self.state(), 1.0 if done else -0.05, done or self.time == LONGEST


hvd.init()
keras.utils.set_random_seed(hvd.rank())
environment = Walk(seed=hvd.rank())
sampler = np.random.default_rng(1000 + hvd.rank())
policy = keras.Sequential([keras.layers.Dense(16, activation="relu"), keras.layers.Dense(2)])
policy.build((None, 2))
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.02))
hvd.broadcast_variables(policy.variables, root_rank=0)

lengths = []
for _ in range(EPISODES):
    states, actions, rewards, done = [environment.reset()], [], [], False
    while not done:
        probabilities = tf.nn.softmax(policy(states[-1][None]))[0].numpy().astype("float64")
        actions.append(sampler.choice(2, p=probabilities / probabilities.sum()))
        state, reward, done = environment.step(actions[-1])
        states.append(state)
        rewards.append(reward)
    returns = [sum(r * DISCOUNT**i for i, r in enumerate(rewards[t:])) for t in range(len(rewards))]
    returns = np.array(returns, "float32") - np.mean(returns)
    with tf.GradientTape() as tape:
        logits = policy(np.stack(states[:-1]))
        taken = tf.nn.sparse_softmax_cross_entropy_with_logits(np.array(actions), logits)
        loss = tf.reduce_mean(taken * returns)
    gradients = tape.gradient(loss, policy.trainable_variables)
    optimizer.apply_gradients(zip(gradients, policy.trainable_variables))
    lengths.append(len(rewards))
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *policy.get_weights())
