"""The recorder of operations, the status file and the timeline. The package imports only core."""
