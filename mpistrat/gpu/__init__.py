"""Collectives on GPU arrays. Only `device` imports cupy; the other modules run, and are tested, without it."""
