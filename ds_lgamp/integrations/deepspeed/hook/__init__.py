"""Puts the engine behind an unchanged script."""
