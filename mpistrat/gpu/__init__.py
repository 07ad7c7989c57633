"""Collectives on arrays that live on a GPU. `device` alone imports cupy; the rest runs, and is tested, without."""
