"""Control messages and collectives in the shared memory of one host's ranks."""
