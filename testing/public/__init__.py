"""Runs unedited public code with and without a block: ``python -m testing.public``.

The trees are given by path. A part without a tree is reported as skipped. Everything runs on the CPU and gloo.
"""
