"""`mpistrat timeline`: what a timeline says, as text and as a page with charts."""

from .command import main

__all__ = ["main"]
