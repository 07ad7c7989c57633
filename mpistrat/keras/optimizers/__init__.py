"""DistributedOptimizer and the classes behind it, and the collectives and load_model of mpistrat.keras."""
