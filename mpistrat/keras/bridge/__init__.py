"""The interface to Keras: its private names, replacements for its functions, and the state of training in fit."""
