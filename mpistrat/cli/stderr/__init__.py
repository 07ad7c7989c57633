"""stderr of mpirun: lines that are shown at once, lines that several ranks print, and the summary at the end."""
