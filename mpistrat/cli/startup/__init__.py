"""The directory that `mpistrat run` puts on the PYTHONPATH of the ranks, for its module `sitecustomize`."""
