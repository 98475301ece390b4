"""The training step as a program: orders, placement, passes, validation and simulation. Pure Python without torch."""
