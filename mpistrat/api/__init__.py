"""What users call on arrays: init and shutdown, ranks, collectives; and how all packages below are put together."""
