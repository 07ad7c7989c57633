"""Collectives in functions that XLA compiles: a custom call whose handler is Python."""
