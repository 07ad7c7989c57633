"""Keras under MPIStrategy, where Keras' own trainer, files and optimizers need changes."""
