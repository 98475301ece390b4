"""Public code, unedited, with a block and without: ``python -m testing.public``.

The trees are given by path; what has none is skipped, visibly. Everything runs on the CPU and gloo.
"""
