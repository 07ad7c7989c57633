"""What only a machine with a GPU can show, as one command: python -m tests.gpu. See docs/testing-on-a-gpu.md."""
