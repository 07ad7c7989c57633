"""The version of mpistrat; setup.cfg reads it from here."""

__version__ = "0.1.0"
