"""Packing and unpacking many GPU arrays with one launch of a kernel."""
