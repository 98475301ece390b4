"""The pages and what writes their generated blocks."""
