"""Collectives in graphs and in eager code: how each kind of graph executes them, and how gradients form buckets."""
