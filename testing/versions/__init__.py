"""Runs the tests with other versions of Python, torch and DeepSpeed."""
