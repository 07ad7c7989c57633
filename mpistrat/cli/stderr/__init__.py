"""Filter the stderr of mpirun: lines shown at once, lines that several ranks print, and the summary at the end."""
