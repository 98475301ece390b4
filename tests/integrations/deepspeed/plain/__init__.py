"""The engine of plain scripts."""
