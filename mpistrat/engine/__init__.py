"""The background thread that negotiates and executes collectives."""
