"""`mpistrat top`: show the ranks of a running job, from the status file that rank 0 writes once a second."""
