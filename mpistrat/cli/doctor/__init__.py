"""`mpistrat doctor`: what this machine has, and what will go wrong on the hosts of a job, before the job does."""
