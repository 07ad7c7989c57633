"""Checks that need a machine with a GPU, run by one command: python -m tests.gpu. See docs/testing-on-a-gpu.md."""
