"""How a process of a job starts, fails, reports and ends: its launcher, its environment, its exit code."""
