"""Writes the generated blocks and plots of README.md and docs/ from recorded runs: ``python -m benchmarks report``."""

from collections.abc import Callable
from functools import partial

from benchmarks import NAMES, ON_ACCELERATOR, plots, tables
from benchmarks.record import ROOT
from docs import policy
from docs.blocks import with_block
from docs.versions import versions_table
from testing.public.outcome import page_block

BLOCKS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {
        "quickstart": tables.quickstart,
        "peers": tables.peers,
        "training-slow": partial(tables.training, "training_slow", "small"),
        "versions": versions_table,
    },
    "docs/benchmarks.md": {
        "targets": tables.targets,
        **{f"machine-{name}": partial(tables.machine, name) for name in NAMES if name != ON_ACCELERATOR},
        "communication-1": partial(tables.communication, 1),
        "communication-2": partial(tables.communication, 2),
        "memory-1": partial(tables.memory, 1),
        "memory-2": partial(tables.memory, 2),
        "turn": tables.turn,
        "schedule-loopback": partial(tables.schedule, "loopback"),
        "schedule-slow": partial(tables.schedule, "1 Gbit/s"),
        "latency": tables.latency,
        "overlap": tables.overlap,
        "network": tables.network,
        "training-small": partial(tables.training, "training", "small"),
        "training-wide": partial(tables.training, "training", "wide"),
        "training-slow": partial(tables.training, "training_slow", "small"),
        "gathers": tables.gathers,
        "overhead": tables.overhead,
        **{f"growth-{part}": partial(tables.growth, metrics) for part, metrics in tables.GROWTH.items()},
        "launch": tables.launch,
        "checkpoint": tables.checkpoint,
        "saving": tables.saving,
        "gpu": tables.gpu,
    },
    "docs/compatibility.md": {"public": page_block},
    "docs/megatron.md": {"megatron": tables.megatron},
    "docs/performance.md": {"overhead": tables.overhead},
    "docs/partition.md": {
        "picture": policy.picture,
        "picture-1": partial(policy.picture, "--resident-chunks", "1"),
        "costs": policy.costs,
        "overlap": tables.overlap,
    },
}
"""By page and name of the block, what stands in it."""


def with_blocks(page: str, text: str) -> str:
    """``text`` of ``page`` with every generated block brought up to date."""
    for name, content in BLOCKS[page].items():
        text = with_block(text, name, content())
    return text


def write_pages() -> None:
    pages = {ROOT / page: with_blocks(page, (ROOT / page).read_text()) for page in BLOCKS}
    for path, text in pages.items():
        path.write_text(text)
    plots.write()
