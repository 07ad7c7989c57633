"""`mpistrat bench`: measure collectives on the ranks of a job."""
