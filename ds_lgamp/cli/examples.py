"""Examples of the commands, for their ``--help`` and for docs/commands.md."""

import argparse
from typing import Any

EXAMPLES = {
    "schedule": (
        "ds_lgamp schedule --pipeline-ranks 4 --chunks-per-rank 4 --micro-batches 8",
        "ds_lgamp schedule --schedule 1f1b --json",
        "ds_lgamp schedule --gather 1 --reduce 2 --html schedule.html",
    ),
    "plan": (
        "ds_lgamp plan --model llama-8b --cluster a100 --gpus 64 --batch-size 512",
        "ds_lgamp plan --model config.json --cluster this.json --batch-size 64 --write plan",
        "ds_lgamp plan --calibrate --cluster this.json",
    ),
    "view": (
        "ds_lgamp view runs/trace",
        "ds_lgamp view runs/trace --against simulated --html step.html",
        "ds_lgamp view runs/before --against runs/after --html both.html",
        "ds_lgamp view runs/trace --perfetto trace.pftrace",
    ),
    "run": (
        "torchrun --nproc_per_node 8 -m ds_lgamp run train.py --deepspeed_config ds_config.json",
        "ds_lgamp run --explain --ranks 8 train.py --deepspeed_config ds_config.json",
        "torchrun --nproc_per_node 8 -m ds_lgamp run pretrain_gpt.py FLAGS --ds-lgamp-config ds_config.json",
    ),
    "checkpoint info": ("ds_lgamp checkpoint info runs/checkpoints",),
    "checkpoint verify": ("ds_lgamp checkpoint verify runs/checkpoints/global_step100",),
    "checkpoint export": (
        "ds_lgamp checkpoint export runs/checkpoints weights",
        "ds_lgamp checkpoint export runs/checkpoints stock/start --format deepspeed --pipeline-ranks 2 --data-ranks 4",
    ),
    "checkpoint import": ("ds_lgamp checkpoint import model.safetensors runs/checkpoints/start",),
    "checkpoint publish": ("ds_lgamp checkpoint publish /dev/shm/live runs/checkpoints",),
    "cluster detect": ("torchrun --nnodes 4 --nproc_per_node 8 -m ds_lgamp cluster detect cluster.json",),
    "env": ("ds_lgamp env --json",),
}
"""By command; the first of each does what most people want."""


def with_examples(command: str) -> dict[str, Any]:
    """Returns the keyword arguments with which the parser of ``command`` shows its examples."""
    lines = "".join(f"  {example}\n" for example in EXAMPLES[command])
    return {"epilog": f"examples:\n{lines}", "formatter_class": argparse.RawDescriptionHelpFormatter}
