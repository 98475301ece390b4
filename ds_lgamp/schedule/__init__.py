"""The training step as a program: orders, placement, lowering, validation and simulation. Pure Python, no torch."""
