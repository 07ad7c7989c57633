"""Collectives on GPU tensors as one asynchronous operation of TensorFlow, whose kernel is Python. See call_site.py."""
