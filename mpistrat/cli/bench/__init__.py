"""`mpistrat bench`: measure collectives, or synthetic training, on the ranks of a job."""
