"""Measurements and the reports made from them."""
