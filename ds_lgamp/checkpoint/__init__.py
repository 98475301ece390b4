"""Checkpoints that load at any layout. They store whole tensors by global name, and every rank writes and reads its own
parts. A save is published as a whole or not at all."""
