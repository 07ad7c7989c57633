"""TensorFlow's own cluster of servers, formed from the ranks: roles, addresses, TF_CONFIG, and ranks that die."""
