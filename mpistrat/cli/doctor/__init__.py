"""`mpistrat doctor`: show what this machine has, and find problems on the hosts of a job before the job runs."""
