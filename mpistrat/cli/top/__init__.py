"""`mpistrat top`: what the ranks of a running job do, from the file that its first rank writes once a second."""
