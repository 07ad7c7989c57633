"""Optimizers whose state is divided among the ranks (ZeRO-1): the plan, the parts, and the class of the optimizer."""
