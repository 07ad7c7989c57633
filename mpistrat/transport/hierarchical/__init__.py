"""Collectives of several hosts with several ranks each."""
