"""DistributedOptimizer and DistributedModel: the classes of optimizers, and the functions that go with them."""
