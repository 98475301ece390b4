"""Formulas for the cost of a program: bytes of memory and bytes of traffic."""
