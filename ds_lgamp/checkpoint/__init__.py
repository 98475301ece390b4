"""Checkpoints that any layout can load."""
