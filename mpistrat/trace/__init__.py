"""The recorder of operations, and what is made of it: the status file and the timeline. It imports only core."""
