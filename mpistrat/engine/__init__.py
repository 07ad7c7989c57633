"""The engine, which negotiates and executes collectives in one thread at a time."""
