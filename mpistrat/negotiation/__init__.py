"""Decides which operations all ranks execute next, and in which order. Pure: time and messages are arguments."""
