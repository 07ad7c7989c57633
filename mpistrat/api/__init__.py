"""The API on arrays: init and shutdown, ranks, collectives. It also wires the packages below together."""
