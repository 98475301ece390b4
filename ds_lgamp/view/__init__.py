"""Drawings of a simulated program: text and SVG. Pure Python."""
