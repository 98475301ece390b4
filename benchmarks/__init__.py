"""Measurements and their records."""

NAMES = (
    "communication",
    "memory",
    "turn",
    "recomputation",
    "schedule",
    "latency",
    "zero_bubble",
    "overlap",
    "network",
    "updates",
    "offload",
    "bus",
    "training",
    "training_slow",
    "compiled",
    "unlike",
    "islands",
    "speeds",
    "door",
    "divided_experts",
    "adapters",
    "bf16_state",
    "host_update",
    "disk_update",
    "rounded",
    "quantised",
    "bert",
    "bert_learning",
    "bert_plan",
    "gathers",
    "optimizers",
    "overhead",
    "tracing",
    "growth",
    "checkpoint",
    "restart",
    "live",
    "megatron",
    "megatron_slow",
    "planner_fit",
    "prediction",
    "one_machine",
    "sources",
    "gpu",
    "gpu_memory",
)
"""The benchmarks of ``python -m benchmarks run``, in the order of docs/benchmarks.md."""

ON_ACCELERATOR = "gpu"
"""The benchmark that runs on the machine's accelerator. All others run on the CPU."""

OF_BERT = ("bert", "bert_learning", "bert_plan")
"""The benchmarks whose tables stand in docs/bert.md."""

_ON_THE_HOST = ("one_machine", "offload", "bf16_state", "host_update", "disk_update", "bus")
ELSEWHERE = ("prediction", "sources", "optimizers", "restart", "tracing", *_ON_THE_HOST, *OF_BERT)
"""The benchmarks whose tables stand in docs/planner.md, docs/one_machine.md, docs/optimizers.md, docs/offload.md,
docs/failures.md, docs/tracing.md and docs/bert.md."""

_PLACES = ("two islands, 200mbit", "two islands, 50mbit", "three islands, 100mbit", "one slow node, 100mbit")
IN_PARTS = {
    "recomputation": ("GPT", "Llama"),
    "unlike": _PLACES,
    "islands": _PLACES,
    "divided_experts": ("counts", "seconds of two ranks", "seconds of four ranks"),
    "adapters": ("counts", "loopback", "200 Mbit/s", "50 Mbit/s"),
    "rounded": ("curves", "seconds"),
    "zero_bubble": ("virtual", "real steps"),
    "quantised": ("curves", "seconds", "peers"),
}
"""Benchmarks that take long, and what ``--part`` of ``python -m benchmarks run`` may name of them."""
