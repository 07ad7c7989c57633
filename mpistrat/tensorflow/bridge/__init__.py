"""From TensorFlow's tensors, eager and in graphs, to the engine and back."""
