"""A module that a forward imports when it runs."""

FACTOR = 1.0
