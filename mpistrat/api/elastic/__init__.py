"""Elastic training: states that survive the loss of ranks, and how ranks notice a loss and recover."""
