"""Measures machines and writes their cluster files: ``ds_lgamp plan --calibrate`` and ``ds_lgamp cluster detect``."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ds_lgamp.cli.terminal import at_work, why_not_writable
from ds_lgamp.partition.agreement import everyone, raise_everywhere
from ds_lgamp.planner.cluster import Link, named_cluster
from ds_lgamp.planner.fields import read_json, with_unit
from ds_lgamp.planner.islands import Node, cluster_text
from ds_lgamp.runtime.calibrate import Calibration, calibrate, measure_nodes
from ds_lgamp.runtime.node import network_kind, node_name, own_interface
from ds_lgamp.watch.launcher import require_launcher


def calibrate_cluster(path: Path, as_json: bool, output: TextIO) -> int:
    """Measures, and writes ``path``. Rank 0 writes and prints. Returns the exit status.

    Under torchrun, all ranks measure links too. What cannot be measured stays as the file has it; a new file gets the
    links of the ready cluster a100, and standard error says which ones to correct.

    Raises ValueError, before it measures, if the file exists and is no cluster file, or cannot be written.
    """
    accelerator = get_accelerator()
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    text = {}
    if rank == 0:
        text, complaint = _existing(path), why_not_writable(path)
        if complaint is not None:
            raise ValueError(f"--cluster is {complaint}")
    device = torch.device(accelerator.device_name(int(os.environ.get("LOCAL_RANK", 0))))
    if device.type != "cpu":
        accelerator.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if ranks > 1:
        dist.init_process_group(accelerator.communication_backend_name() if device.type != "cpu" else "gloo")
    with at_work("measuring this machine"):
        found = calibrate(device)
    if rank == 0:
        text = merged(text, found)
        path.write_text(json.dumps(text, indent=2) + "\n")
        output.write(json.dumps(text) + "\n" if as_json else f"{path}:\n{json.dumps(text, indent=2)}\n")
    if ranks > 1:
        dist.destroy_process_group()
    return 0


def merged(text: dict[str, Any], found: Calibration) -> dict[str, Any]:
    """Returns the cluster file ``text`` with what was ``found`` in place of what it said."""
    text = {"name": "measured", **text}
    text["nodes"] = max(found.nodes, text.get("nodes", 1))
    text["gpus_per_node"] = max(found.ranks_per_node, text.get("gpus_per_node", 1))
    text["peak"] = with_unit(found.flops, "FLOP/s")
    text["memory"] = with_unit(found.memory, "B")
    text["memory_bandwidth"] = with_unit(found.memory_bandwidth, "B/s")
    assumed = named_cluster("a100")
    for name, link in (("inside", found.inside), ("between", found.between)):
        if link is not None:
            text[name] = {**text.get(name, {}), **_link(link.bandwidth, link.latency)}
        elif name not in text:
            ready = getattr(assumed, name)
            text[name] = _link(ready.bandwidth, ready.latency)
            if name == "between":
                text[name]["cards_per_node"] = assumed.cards_per_node
            print(f"{name} was not measured: the file has that of {assumed.name}; correct it", file=sys.stderr)
    # The rates above were reached, so nothing remains to be lost but what small products lose.
    reached = {"matmul": 1.0, "memory": 1.0, "dimension": round(found.half_size, 1)}
    if found.between is not None:
        reached["between"] = 1.0
    if found.gather_inside is not None:
        reached["inside"] = round(min(1.0, found.gather_inside), 3)
    text["efficiency"] = {**text.get("efficiency", {}), **reached}
    return text


def _link(bandwidth: float, latency: float) -> dict[str, Any]:
    return {"bandwidth": with_unit(bandwidth, "B/s"), "latency": with_unit(latency, "s")}


def _existing(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    text = read_json(path, "--cluster")
    if "islands" in text:
        raise ValueError(
            f"--cluster is '{path}', which has islands, but --calibrate describes nodes that are alike; name another "
            "file, and copy its peak, memory and memory_bandwidth"
        )
    for key in ("nodes", "gpus_per_node"):
        if not isinstance(text.get(key, 1), int):
            raise ValueError(f"--cluster is '{path}', whose {key} is {text[key]!r}; write a whole number")
    return text


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
