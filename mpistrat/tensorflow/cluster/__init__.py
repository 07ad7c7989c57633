"""TensorFlow's own cluster for its servers: roles, addresses, TF_CONFIG, and ranks that die."""
