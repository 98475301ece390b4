"""Measurements and the reports made from them."""

NAMES = ("communication", "memory", "schedule", "overlap", "network", "overhead", "programs", "checkpoint", "megatron")
"""The benchmarks of ``python -m benchmarks run``, in the order of docs/benchmarks.md."""
