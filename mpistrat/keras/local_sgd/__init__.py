"""Local SGD: each rank trains weights of its own, and all ranks average them every so many steps."""
