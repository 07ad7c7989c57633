"""Forms a TensorFlow cluster of servers from the ranks: roles, addresses, and what happens when ranks die."""
