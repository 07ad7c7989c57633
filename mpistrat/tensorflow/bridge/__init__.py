"""The bridge between TensorFlow's tensors, eager and in graphs, and the engine."""
