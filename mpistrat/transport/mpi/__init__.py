"""Control messages and collectives over MPI, and how the MPI library is loaded and finalised."""
