"""Keras as mpistrat sees it: its private names, the functions of it that are replaced, and the state of a training."""
