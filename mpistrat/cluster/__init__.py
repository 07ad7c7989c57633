"""TensorFlow's own cluster of servers, formed from the ranks: roles, addresses, and ranks that die."""
