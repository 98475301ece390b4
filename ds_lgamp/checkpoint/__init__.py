"""Checkpoints that load at any layout: whole tensors by global name, written and read in parts, whole or absent."""
