"""Every generated block and plot of README.md and docs/: what stands where."""

from collections.abc import Callable
from functools import partial

from benchmarks import ELSEWHERE, NAMES, OF_BERT, ON_ACCELERATOR
from benchmarks.record import BELOW_FLOOR, IN_SPREAD, MET, MISSED
from docs import (
    bert_tables,
    bus_tables,
    checkpoint_tables,
    expert_tables,
    gpu_tables,
    messages,
    network_tables,
    offload_tables,
    planner_tables,
    plots,
    policy,
    reference,
    situations,
    speeds,
    tables,
)
from docs.blocks import with_block
from docs.pivot import setting
from docs.versions import versions_table
from testing import ROOT
from testing.chaos.record import page_block as chaos_block
from testing.public.outcome import RECORDED, by_stage, page_block
from testing.versions.record import page_block as versions_block

BLOCKS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {
        "situations": situations.situations,
    },
    "docs/overview.md": {"quickstart": tables.quickstart, "versions": versions_table},
    "docs/benchmarks.md": {
        "fastest": partial(tables.fastest, "training_slow", "training"),
        "targets-missed": partial(tables.targets, MISSED),
        "targets-floor": partial(tables.targets, BELOW_FLOOR, IN_SPREAD),
        "targets-met": partial(tables.targets, MET),
        **{
            f"machine-{name}": partial(tables.machine, name)
            for name in NAMES
            if name not in (ON_ACCELERATOR, *ELSEWHERE)
        },
        "communication-1": partial(tables.communication, 1),
        "communication-2": partial(tables.communication, 2),
        "memory-1": partial(tables.memory, 1),
        "memory-2": partial(tables.memory, 2),
        "turn": tables.turn,
        "schedule-loopback": partial(tables.schedule, "loopback"),
        "schedule-slow": partial(tables.schedule, "1 Gbit/s"),
        "zero-bubble": tables.zero_bubble,
        "real-steps": tables.real_steps,
        "latency": network_tables.latency,
        "overlap": tables.overlap,
        "network": network_tables.network,
        "updates": network_tables.updates,
        "training-small": partial(tables.training, "training", "small"),
        "training-wide": partial(tables.training, "training", "wide"),
        "training-slow": partial(tables.training, "training_slow", "small"),
        "compiled": tables.compiled,
        "unlike": network_tables.unlike,
        "islands": network_tables.islands,
        "speeds": network_tables.speeds,
        "door": tables.door,
        "door-by-hand": tables.by_hand,
        "divided-experts": expert_tables.counts,
        "divided-experts-seconds": expert_tables.seconds,
        "adapters": tables.adapters,
        "rounded": network_tables.rounded,
        "quantised-curves": partial(network_tables.curves, "quantised"),
        "quantised-seconds": network_tables.quantised_seconds,
        "quantised-peers": partial(network_tables.quantised_seconds, "peers"),
        "gathers": network_tables.gathers,
        "recomputation": tables.recomputation,
        "overhead": tables.overhead,
        **{f"growth-{part}": partial(tables.growth, metrics) for part, metrics in tables.GROWTH.items()},
        "launch": tables.launch,
        "checkpoint": checkpoint_tables.checkpoint,
        "saving": checkpoint_tables.saving,
        "live": checkpoint_tables.live,
        "megatron-slow": tables.megatron_slow,
        "planner-errors": planner_tables.planner_errors,
        "planner-constants": planner_tables.planner_constants,
        "gpu": gpu_tables.gpu,
        "gpu-memory": gpu_tables.memory,
        "machine-gpu-day": gpu_tables.day_machines,
        "gpu-stages": gpu_tables.stages,
        "gpu-largest": gpu_tables.largest,
        "gpu-settings": gpu_tables.settings,
    },
    "docs/bert.md": {
        **{f"machine-{name}": partial(tables.machine, name) for name in OF_BERT},
        "scaling": bert_tables.scaling,
        "learning": bert_tables.learning,
        "learned": bert_tables.learned,
        "plan": bert_tables.plan,
    },
    "docs/commands.md": {"commands": reference.commands},
    "docs/compatibility.md": {"public": page_block, "versions": versions_block},
    "docs/configuration.md": {"block": reference.block_table, "keys": reference.keys_table},
    "docs/failures.md": {
        "chaos": chaos_block,
        "machine-restart": partial(tables.machine, "restart"),
        "restart": checkpoint_tables.restart,
    },
    "docs/megatron.md": {"megatron": tables.megatron},
    "docs/networks.md": {"speeds": speeds.by_speed},
    "docs/performance.md": {"overhead": tables.overhead},
    "docs/one_machine.md": {
        "machine": partial(tables.machine, "one_machine"),
        "one-machine": planner_tables.one_machine,
    },
    "docs/planner.md": {
        "machine-sources": partial(tables.machine, "sources"),
        "sources": planner_tables.sources,
        "machine-prediction": partial(tables.machine, "prediction"),
        "prediction": planner_tables.prediction,
    },
    "docs/offload.md": {
        "picture-next-step": partial(offload_tables.program, "next_step"),
        "picture-reduction": partial(offload_tables.program, "reduction"),
        "held": offload_tables.held,
        "tokens": offload_tables.tokens,
        "machine-host_update": partial(tables.machine, "host_update"),
        "host-update": bus_tables.updates,
        "machine-disk_update": partial(tables.machine, "disk_update"),
        "disk-update": bus_tables.on_disk,
        "machine-bf16_state": partial(tables.machine, "bf16_state"),
        "bf16-state": partial(network_tables.curves, "bf16_state", ("learning rate", setting("learning_rate"))),
        "machine": partial(tables.machine, "offload"),
        "moved": bus_tables.moved,
        "machine-bus": partial(tables.machine, "bus"),
        "throttled": bus_tables.throttled,
        "gpu-offload": gpu_tables.offloading,
    },
    "docs/python.md": {"functions": reference.functions},
    "docs/stacks.md": {
        name: partial(page_block, RECORDED.with_name(f"{name}.json")) for name in ("stacks", "accelerate", "programs")
    },
    "docs/experts.md": {"experts": partial(page_block, RECORDED.with_name("experts.json"), by_stage)},
    "docs/optimizers.md": {"machine": partial(tables.machine, "optimizers"), "optimizers": tables.optimizers},
    "docs/tracing.md": {"machine": partial(tables.machine, "tracing"), "tracing": tables.tracing},
    "docs/troubleshooting.md": {section: partial(messages.messages, section) for section in messages.SECTIONS},
    "docs/partition.md": {
        "picture": policy.picture,
        "picture-1": partial(policy.picture, "--resident-chunks", "1"),
        "picture-updates": partial(policy.picture, "--reduce", "9", "--update", "3", "--updates", "reduction"),
        "picture-regather": partial(policy.picture, "--regather", "host", "--weights", "1"),
        "picture-nodes": partial(policy.picture, "--node-shards", "refreshed", "--refresh", "4", "--combine", "4"),
        "costs": policy.costs,
        "overlap": tables.overlap,
    },
}
"""By page and name of the block, the function that makes its content."""


def with_blocks(page: str, text: str) -> str:
    """Returns ``text`` of ``page`` with every generated block brought up to date."""
    for name, content in BLOCKS[page].items():
        text = with_block(text, name, content())
    return text


def write() -> None:
    """Writes every page and plot; none of them if a block or a record is missing."""
    pages = {ROOT / page: with_blocks(page, (ROOT / page).read_text()) for page in BLOCKS}
    for path, text in pages.items():
        path.write_text(text)
    plots.write()
