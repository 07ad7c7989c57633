"""DistributedOptimizer: the classes of distributed optimizers, and the functions that go with them."""
