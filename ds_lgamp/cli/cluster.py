"""``ds_lgamp cluster detect``: measures the nodes of a job and writes their cluster file."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ds_lgamp.cli.options import why_not_writable
from ds_lgamp.cli.progress import at_work
from ds_lgamp.partition.agreement import everyone, raise_everywhere
from ds_lgamp.planner.cluster import Link
from ds_lgamp.planner.islands import Node, cluster_text
from ds_lgamp.runtime.before_init import node_name, require_launcher
from ds_lgamp.runtime.calibrate import measure_nodes
from ds_lgamp.runtime.hardware import network_kind, own_interface


def detect(path: Path, as_json: bool, output: TextIO) -> int:
    """Measures, and writes ``path``. Collective over all ranks that a launcher started. Rank 0 writes and prints.
    Returns the exit status.

    Raises ValueError on every rank, before it measures, if the file exists or cannot be written, or if no launcher has
    set the environment.
    """
    require_launcher()
    accelerator = get_accelerator()
    device = torch.device(accelerator.device_name(int(os.environ["LOCAL_RANK"])))
    if device.type != "cpu":
        accelerator.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(accelerator.communication_backend_name() if device.type != "cpu" else "gloo")
    try:
        raise_everywhere(_complaint_about(path) if dist.get_rank() == 0 else None, ValueError)
        with at_work("measuring every pair of nodes"):
            measured = measure_nodes(device)
        interface = own_interface(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        facts = {node: rest for node, *rest in everyone((node_name(), network_kind(), interface))}
        flops: Sequence[float | None] = measured.flops or [None] * len(measured.nodes)
        nodes = [
            Node(name, gpus, facts[name][0], speed, facts[name][1])
            for name, gpus, speed in zip(measured.nodes, measured.ranks_per_node, flops)
        ]
        links = {frozenset(pair): Link(*rate) for pair, rate in measured.links.items()}
        text = cluster_text(nodes, links, None if measured.inside is None else Link(*measured.inside))
        if dist.get_rank() == 0:
            path.write_text(json.dumps(text, indent=2) + "\n")
            output.write(json.dumps(text) + "\n" if as_json else f"{path}:\n{json.dumps(text, indent=2)}\n")
    finally:
        dist.destroy_process_group()
    return 0


def _complaint_about(path: Path) -> str | None:
    if path.exists():
        return f"{path} exists; name another file"
    complaint = why_not_writable(path)
    return None if complaint is None else f"FILE is {complaint}"
