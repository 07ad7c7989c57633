"""The API for arrays: init() and shutdown(), ranks, collectives. init() creates the backends and the engine."""
