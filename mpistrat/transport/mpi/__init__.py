"""Control messages and collectives over MPI, and the MPI library itself."""
