"""Tests that start mpirun, or the command line, and look at what the job leaves."""
