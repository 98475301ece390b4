"""What a program costs: bytes of memory and of traffic, from formulas."""
