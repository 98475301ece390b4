"""Measurements and their records."""

NAMES = (
    "communication",
    "memory",
    "turn",
    "schedule",
    "latency",
    "overlap",
    "network",
    "training",
    "training_slow",
    "door",
    "gathers",
    "overhead",
    "growth",
    "checkpoint",
    "megatron",
    "gpu",
)
"""The benchmarks of ``python -m benchmarks run``, in the order of docs/benchmarks.md."""

ON_ACCELERATOR = "gpu"
"""The benchmark that runs on the machine's accelerator. All others run on the CPU."""
