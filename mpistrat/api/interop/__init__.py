"""Tensors of other libraries, and the GPU of this rank."""
