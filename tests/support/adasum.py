"""Adasum by its formula, for comparison: Maleki et al., "Scaling Distributed Training with Adaptive Summation"."""

import numpy as np


def adasum_of(parts: list[np.ndarray]) -> np.ndarray:
    """The paper's formula in float64, in pairs of neighbours."""
    while len(parts) > 1:
        pairs = []
        for a, b in zip(parts[::2], parts[1::2]):
            dot, of_a, of_b = (a * b).sum(), (a * a).sum(), (b * b).sum()
            pairs.append((1 - dot / (2 * of_a) if of_a else 1) * a + (1 - dot / (2 * of_b) if of_b else 1) * b)
        parts = pairs + (parts[-1:] if len(parts) % 2 else [])
    return parts[0]
