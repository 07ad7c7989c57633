"""`mpistrat bench`: measure all-reduces, or synthetic training, on the ranks of a job."""

from .command import main

__all__ = ["main"]
