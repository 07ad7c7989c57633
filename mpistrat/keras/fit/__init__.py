"""What fit on several ranks does besides training: it compares the ranks, averages, measures, and writes files once."""
