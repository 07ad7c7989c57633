"""What Model.fit of several ranks does besides training: it checks, averages, measures, and writes files once."""
